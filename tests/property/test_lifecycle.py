"""Sessions in any order, broken in any way, beside a dictionary of what each model holds."""

from weightload.testing import SessionMachine

TestLifecycle = SessionMachine.TestCase

"""What the cases call in worker processes, beside what weightload brings."""

import os
import signal
import time

from common import Places

from weightload.vllm import WorkerExtension, worker_extension

NORM = "model.layers.1.input_layernorm.weight"


class _Looking:
    """Looks at the model of one rank, and can make its loaders fail."""

    def remember_places(self):
        self.places = Places(self.get_model())

    def moved(self):
        return self.places.changes()

    def break_loaders(self, rank, how):
        """Let the loaders of one rank raise in the middle, or lose a tensor."""
        if self.rank != rank:
            return
        model = self.get_model()
        whole = model.load_weights

        def some(weights):
            for index, pair in enumerate(weights):
                if index == 12 and how == "raise":
                    raise RuntimeError("this rank is broken")
                if not (pair[0] == NORM and how == "lose"):
                    yield pair

        model.load_weights = lambda weights: whole(some(weights))

    def process(self):
        """Return the number of the process."""
        return os.getpid()

    def die_in(self, rank, step):
        """Let one rank end as by ``kill -9``, in its loaders or in the first hook of the finish."""
        if self.rank != rank:
            return
        model = self.get_model()
        whole = model.load_weights
        method = model.lm_head.quant_method

        def die(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

        def some(weights):
            for index, pair in enumerate(weights):
                if index == 1:
                    die()
                yield pair

        if step == "load":
            model.load_weights = lambda weights: whole(some(weights))
        else:
            method.process_weights_after_loading = die

    def interrupt(self, caller):
        """Let the loaders of rank 1 interrupt the caller, and then take their time."""
        if self.rank != 1:
            return
        model = self.get_model()
        whole = model.load_weights

        def load_weights(weights):
            model.load_weights = whole
            os.kill(caller, signal.SIGINT)
            time.sleep(1.0)
            return whole(weights)

        model.load_weights = load_weights

    def mend_loaders(self):
        vars(self.get_model()).pop("load_weights", None)


class Extension(_Looking, WorkerExtension):
    """Under the names that weightload gives."""


class MyExtension(_Looking, worker_extension("mine")):
    """Under names of one's own."""

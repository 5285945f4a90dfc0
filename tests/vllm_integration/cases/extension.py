"""What the cases call in worker processes, beside what weightload brings."""

from common import Places

from weightload.vllm import WorkerExtension, worker_extension


class _Looking:
    """Looks at the model of one rank, and can make its loaders fail."""

    def remember_places(self):
        self.places = Places(self.get_model())

    def moved(self):
        return self.places.changes()

    def break_loaders(self, rank):
        """Let the loaders of one rank raise in the middle of the weights."""
        if self.rank != rank:
            return
        model = self.get_model()
        whole = model.load_weights

        def load_weights(weights):
            def some():
                for index, pair in enumerate(weights):
                    if index == 12:
                        raise RuntimeError("this rank is broken")
                    yield pair

            return whole(some())

        model.load_weights = load_weights

    def mend_loaders(self):
        vars(self.get_model()).pop("load_weights", None)


class Extension(_Looking, WorkerExtension):
    """Under the names that weightload gives."""


class MyExtension(_Looking, worker_extension("mine")):
    """Under names of one's own."""

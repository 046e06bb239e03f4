"""The compiler: there is none."""

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    """Stands where Triton wants a compiler; the interpreter never asks it for anything."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        return {}

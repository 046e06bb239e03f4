"""Transformers' Mixtral with its router's logits, steered by hand as `SteeredReference` steers all else."""

import contextlib

import torch

from capflow.capture.site import Site
from tests.kit.steered import SteeredReference


class ExpertReference(SteeredReference):
    """The reference of a model with experts; `router` is a hook of it, `neurons` none."""

    @contextlib.contextmanager
    def _attending(self, steer):
        linear = torch.nn.functional.linear
        of = {id(layer.mlp.gate.weight): n for n, layer in enumerate(self.layers)}

        def steered(value, weight, bias=None):
            result = linear(value, weight, bias)
            number = of.get(id(weight))
            if number is not None:
                steer(Site(number, "router"), result.view(1, -1, result.shape[-1]))
            return result

        torch.nn.functional.linear = steered
        try:
            with super()._attending(steer):
                yield
        finally:
            torch.nn.functional.linear = linear

"""Fits the Jacobian lens: how the last block's output changes with the stream after each block, on average.

`J[i, j]` is the mean over texts, and over the positions p of a text, of the sum over positions q ≥ p of
`∂ last[q, i] / ∂ stream[p, j]`. So it counts what a row does at its own position and, through attention, at later ones
(Gurnee et al. 2026, transformer-circuits.pub/2026/workspace). The first positions, which attention uses as sinks, and
the last one, which has no next token, do not count, neither as p nor as q.

One backward pass gives some rows of J for all layers: the text is repeated, and each copy has the gradient of one
component of the last block's output, at all its positions at once. A text costs `hidden_size` backward passes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.capture.site import HOOK_DEFAULT
from capflow_models.stream import Layer

DEFINITION = (
    "J[i, j] = mean over texts, and over positions p of a text, of the sum over positions q >= p of "
    "d last[q, i] / d stream[p, j]; the first positions and the last of a text do not count"
)

Matrix = npt.NDArray[Any]


class CountedPositions(NamedTuple):
    """The positions of a text that count: `first .. end`, `end` not included."""

    first: int
    end: int

    @classmethod
    def of(cls, length: int, skipped: int) -> CountedPositions | None:
        """Return those of a text of so many tokens; None if it has none."""
        return cls(skipped, length - 1) if length - 1 > skipped else None


class JacobianFit:
    """The mean Jacobians of a model over the texts that were added.

    model: a causal language model of Transformers. Its parameters are frozen.
    layers: its decoder layers.
    wanted: the layers to fit, below the last one.
    skipped: how many first positions of a text do not count.
    batch: how many rows of J one backward pass gives.
    texts, tokens, positions: what was added: texts, their tokens, and the positions that count.
    """

    def __init__(
        self, model: Any, layers: Sequence[Layer], wanted: Sequence[int], *, skipped: int = 16, batch: int = 8
    ) -> None:
        self._model = model.requires_grad_(requires_grad=False)
        self._layers = layers
        self._wanted = sorted(wanted)
        self._skipped, self._batch = skipped, batch
        size = int(model.config.get_text_config().hidden_size)
        # The sums are as exact as the model, and at least float32.
        self._dtype = torch.promote_types(model.dtype, torch.float32)
        self._sums = {layer: torch.zeros(size, size, dtype=self._dtype) for layer in self._wanted}
        self._size = size
        self.texts = self.tokens = self.positions = 0

    def add(self, token_ids: Sequence[int], on_rows: Callable[[int], object] = lambda _: None) -> bool:
        """Add a text; return whether it has a position that counts.

        on_rows: called with the number of rows of J that a backward pass gave.
        """
        counted = CountedPositions.of(len(token_ids), self._skipped)
        if counted is None:
            return False
        last = len(self._layers) - 1
        with torch.enable_grad(), self._streams() as streams:
            ids = torch.tensor([list(token_ids)], device=self._model.device).expand(self._batch, -1)
            # Without the head, whose logits would be large.
            self._model.base_model(input_ids=ids, use_cache=False)
        inputs = [streams[layer] for layer in self._wanted]
        gradient = torch.zeros_like(streams[last])
        at = slice(counted.first, counted.end)
        for first in range(0, self._size, self._batch):
            count = min(self._batch, self._size - first)
            gradient.zero_()
            for copy in range(count):
                gradient[copy, at, first + copy] = 1
            parts = torch.autograd.grad(streams[last], inputs, gradient, retain_graph=first + self._batch < self._size)
            for layer, part in zip(self._wanted, parts, strict=True):
                rows = part[:count, at].to(self._dtype).mean(dim=1)
                self._sums[layer][first : first + count] += rows.cpu()
            on_rows(count)
        self.texts, self.tokens = self.texts + 1, self.tokens + len(token_ids)
        self.positions += counted.end - counted.first
        return True

    def jacobians(self) -> Mapping[int, Matrix]:
        """Return J of each layer, `[hidden_size, hidden_size]`: float64 for a float64 model, else float32."""
        return {layer: np.asarray((total / max(1, self.texts)).numpy()) for layer, total in self._sums.items()}

    @contextmanager
    def _streams(self) -> Iterator[dict[int, torch.Tensor]]:
        """Yield the stream after each layer, filled while the block runs. The graph begins at the first wanted one."""
        streams: dict[int, torch.Tensor] = {}
        handles = []
        for number in (*self._wanted, len(self._layers) - 1):
            layer = self._layers[number]
            place = layer.structure.places[HOOK_DEFAULT]
            hook = _Kept(streams, number, place.items[0], begins=number == self._wanted[0])
            handles.append(layer.module.get_submodule(place.module).register_forward_hook(hook))
        try:
            yield streams
        finally:
            for handle in handles:
                handle.remove()


class _Kept:
    """A forward hook that keeps a layer's output.

    begins: whether derivatives begin here: what is before it is not differentiated.
    """

    def __init__(self, streams: dict[int, torch.Tensor], number: int, item: int, *, begins: bool) -> None:
        self._streams, self._number, self._item, self._begins = streams, number, item, begins

    def __call__(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        stream = output if isinstance(output, torch.Tensor) else output[self._item]
        if not self._begins:
            self._streams[self._number] = stream
            return None
        leaf = self._streams[self._number] = stream.detach().requires_grad_()
        # What follows may change its input in place.
        begun = leaf.clone()
        if isinstance(output, torch.Tensor):
            return begun
        return (*output[: self._item], begun, *output[self._item + 1 :])

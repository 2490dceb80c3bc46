"""Packed weights inside a module tree that otherwise stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from .linear import DenseProduct, Pack, Product


class PackedLinear(nn.Module):
    """An ``nn.Linear`` over packed weights, for inputs of any number of dimensions."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        out = self._product(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


class Replacement(NamedTuple):
    """A module that took the place of another."""

    parent: nn.Module
    name: str
    before: nn.Module

    def undo(self) -> None:
        setattr(self.parent, self.name, self.before)


def pack_modules(root: nn.Module, pack: Pack) -> list[Replacement]:
    """Replace the linear layers below ``root``, except subclasses and those where packing changes the result.

    :returns: how to get the old ones back; they and their weights live as long as it does.
    """
    return list(_replace(root, pack))


def _replace(root: nn.Module, pack: Pack) -> Iterator[Replacement]:
    places = [(parent, name, child) for parent in root.modules() for name, child in parent.named_children()]
    for parent, name, child in places:
        if type(child) is nn.Linear:
            product = DenseProduct.of((child,)).settled(pack)
            if not isinstance(product, DenseProduct):
                setattr(parent, name, PackedLinear(product))
                yield Replacement(parent, name, child)

"""CUDA graphs on a CPU: operations are captured on tensors and replayed on the same tensors.

As on a GPU, a capture changes no tensor, and a replay does not run Python: numbers are those of the
capture, outputs are written to its tensors, random numbers are drawn again.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """Replaces torch.cuda.CUDAGraph."""

    captured = []  # all tapes

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.replays = [], {}, 0
        self.captured.append(self)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("host synchronization during the capture of a CUDA graph")
        for argument, value in zip(operation._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                for tensor in tensors(value):
                    self.before.setdefault(tensor.data_ptr(), (tensor, tensor.detach().clone()))
        results = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, results))
        return results

    def replay(self):
        self.replays += 1
        with torch.no_grad():
            for operation, args, kwargs, results in self.operations:
                again = tensors(operation(*args, **kwargs))
                for new, old in zip(again, tensors(results), strict=True):
                    if new.data_ptr() != old.data_ptr():  # otherwise a view, or in place
                        old.copy_(new)


@contextlib.contextmanager
def capture(tape):
    """Replaces torch.cuda.graph."""
    rng_state = torch.get_rng_state()
    with tape:
        yield
    torch.set_rng_state(rng_state)
    with torch.no_grad():
        for tensor, value in tape.before.values():
            tensor.copy_(value)


def capture_on_the_cpu(monkeypatch):
    Tape.captured.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", capture)

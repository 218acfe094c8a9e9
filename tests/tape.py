"""CUDA graphs for a CPU: operations are recorded on tensors and replayed on the same tensors.

As on a GPU, a recording changes no tensor, and a replay knows nothing of Python: numbers are those
of the recording, results appear in its tensors, random numbers are drawn anew.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph."""

    made = []  # all tapes

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.replays = [], {}, 0
        self.made.append(self)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number was read from the device while its graph was recorded")
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
                    if new.data_ptr() != old.data_ptr():  # else it is a view, or was in place
                        old.copy_(new)


@contextlib.contextmanager
def record(tape, stream):
    """In place of torch.cuda.graph."""
    assert stream is not Stream.default, "the default stream cannot be recorded"
    random = torch.get_rng_state()
    with tape:
        yield
    torch.set_rng_state(random)
    with torch.no_grad():
        for tensor, value in tape.before.values():
            tensor.copy_(value)


class Stream:
    """In place of torch.cuda.Stream. A CPU has but one; what is kept is who waits for whom."""

    default, waits = None, []

    def wait_stream(self, other):
        self.waits.append((self, other))


def on_the_cpu(monkeypatch):
    """Have CudaGraphs record tapes."""

    @contextlib.contextmanager
    def use(stream):
        Stream.waits.append("work")
        yield

    Tape.made.clear()
    Stream.waits.clear()
    Stream.default = Stream()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.default)
    monkeypatch.setattr(torch.cuda, "stream", use)

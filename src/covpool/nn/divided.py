"""A linear classifier that is divided over processes by class, and its exact cross-entropy.

Every process holds the weights of a share of the classes. The features of all images are gathered, and each
process computes the logits of its own classes. Logits are never gathered: the cross-entropy needs a maximum,
a sum of exponentials and the logits of the targets, which are reduced over the processes. Sizes are in
``docs/scale_out.md``.

Shapes: B images of all processes, b of this process, K classes, k of this process, D features, n targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covpool.errors import UsageError

# Values that are drawn at once when weights are initialized.
BLOCK = 2**20


def class_share(classes: int, rank: int, world_size: int) -> range:
    """Return the classes of a process.

    Example:
        >>> [len(class_share(10, rank, 4)) for rank in range(4)]
        [3, 3, 2, 2]

    Raises:
        UsageError: if a process would have no class.
    """
    if classes < world_size:
        raise UsageError(
            f"{classes} classes cannot be divided over {world_size} processes, because each needs a class: "
            f"use at most {classes} processes, or a classifier that is not divided"
        )
    size, more = divmod(classes, world_size)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


class Losses(NamedTuple):
    """The loss of the images of all processes, in the order of the processes; the same in every process.

    Attributes:
        losses: ``(B,)``, the cross-entropy of each image.
        predicted: ``(B,)``, the class of the highest logit.
        classes: ``(B, n)``, the classes of the targets.
        shares: ``(B, n)``, their shares.
    """

    losses: Tensor
    predicted: Tensor
    classes: Tensor
    shares: Tensor


class Scores(NamedTuple):
    """The highest logits of the images of this process, and where the label is among all classes.

    Attributes:
        values: ``(b, top)``, the highest logits, in descending order.
        classes: ``(b, top)``, their classes.
        log_sum: ``(b,)``, the logarithm of the sum of the exponentials of all logits.
        label_logit: ``(b,)``, the logit of the label.
        above: ``(b,)``, number of classes above the label; of equal logits, the first class is the highest.
    """

    values: Tensor
    classes: Tensor
    log_sum: Tensor
    label_logit: Tensor
    above: Tensor


class DividedLinear(nn.Module):
    """A linear classifier whose rows are divided over the processes of the default group.

    All processes call every method together. The initial weights are those of ``nn.Linear`` under the same
    seed, for any number of processes. Keep the module outside DistributedDataParallel: its gradient is
    complete in every process.

    Args:
        in_features: D.
        num_classes: K, over all processes.
        bias: whether there is a bias.
        device: device of the weights.
        dtype: dtype of the weights.

    Attributes:
        rows: the classes of this process.
        weight: ``(k, D)``.
        bias: ``(k,)``, or ``None``.

    Example:
        >>> head = DividedLinear(8, 3)  # a single process has all classes
        >>> head.loss(torch.randn(2, 8), torch.tensor([[0], [2]])).losses.shape
        torch.Size([2])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        is_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_group else 0
        self.world_size = dist.get_world_size() if is_group else 1
        self.rows = class_share(num_classes, self.rank, self.world_size)
        shape = len(self.rows), in_features
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[:1], device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of all classes in the order of ``nn.Linear``, and keep those of this process."""
        # The bounds are equal but for rounding. Both are rounded as in nn.Linear.
        gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
        bound = math.sqrt(3.0) * (gain / math.sqrt(self.in_features))
        _draw(self.weight.data, self.rows, self.num_classes, bound)
        if self.bias is not None:
            _draw(self.bias.data, self.rows, self.num_classes, 1 / math.sqrt(self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(b, D)`` of this process to logits ``(B, k)``: of all images, of its own classes."""
        return self._logits(x, self.counts(x))

    def loss(
        self,
        x: Tensor,
        classes: Tensor,
        shares: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        averaged: bool = False,
    ) -> Losses:
        """Return the cross-entropy of the images of all processes.

        Call ``backward`` on the same sum of these losses in every process. The gradients of ``weight`` and
        ``bias`` are then those of the dense classifier, and so is the gradient of ``x``. Sums are in float32
        at least, also under autocast.

        Args:
            x: features ``(b, D)`` of this process; b may differ between processes, and may be 0.
            classes: ``(b, n)``, the classes of the targets; n is the same in all processes. They may repeat.
            shares: ``(b, n)``, the share of each class, 1 in total; equal shares if not given.
            label_smoothing: share of the target that is spread over all K classes.
            averaged: multiply the gradient of ``x`` by the number of processes, because
                DistributedDataParallel divides by it.
        """
        if shares is None:
            shares = torch.full(classes.shape, 1 / classes.shape[1], device=classes.device)
        counts = self.counts(x)
        # One exchange for both: float64 represents classes exactly.
        packed = torch.cat([classes.double(), shares.double()], dim=1)
        all_classes, all_shares = _all_gather(packed, counts).chunk(2, dim=1)
        logits_Bk = self._logits(x, counts, averaged)
        all_classes, all_shares = all_classes.long(), all_shares.to(_at_least_float32(logits_Bk.dtype))
        losses_B, predicted_B = _CrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's own
            logits_Bk, all_classes, all_shares, self.rows, self.num_classes, label_smoothing
        )
        return Losses(losses_B, predicted_B, all_classes, all_shares)

    @torch.no_grad()
    def score(self, x: Tensor, labels: Tensor, top: int) -> Scores:
        """Return the exact top-k predictions, and the position of the label, of this process's images.

        Args:
            x: features ``(b, D)`` of this process.
            labels: ``(b,)``.
            top: number of predictions; at most K.
        """
        counts = self.counts(x)
        logits_Bk = self._logits(x, counts)
        logits_Bk = logits_Bk.to(_at_least_float32(logits_Bk.dtype))
        labels_B1 = _all_gather(labels[:, None], counts)
        label_logit_B1 = _reduced(_picked(logits_Bk, labels_B1, self.rows))
        ids_k = torch.arange(self.rows.start, self.rows.stop, device=x.device)
        is_equal_Bk = (logits_Bk == label_logit_B1) & (ids_k < labels_B1)
        above_B = _reduced(((logits_Bk > label_logit_B1) | is_equal_Bk).sum(dim=1))
        # Every process sends the highest logits of its classes, and the log-sum of all of them.
        top = min(top, self.num_classes)
        values_Bt, places_Bt = logits_Bk.topk(min(top, len(self.rows)), dim=1)
        missing = top - values_Bt.shape[1]
        values_Bt = F.pad(values_Bt, (0, missing), value=-torch.inf)
        sent = torch.cat([logits_Bk.logsumexp(1, keepdim=True), values_Bt], dim=1)
        share = slice(sum(counts[: self.rank]), sum(counts[: self.rank + 1]))
        values_pbt, places_pbt = (
            _all_gather(part, [len(part)] * self.world_size).unflatten(0, (self.world_size, -1))[:, share]
            for part in (sent, F.pad(places_Bt + self.rows.start, (0, missing)))
        )
        joined = values_pbt[..., 1:].transpose(0, 1).flatten(1)
        # Stable: of equal logits, the first class comes first.
        values_bt, order_bt = joined.sort(dim=1, descending=True, stable=True)
        classes_bt = places_pbt.transpose(0, 1).flatten(1).gather(1, order_bt)
        log_sum_b = values_pbt[..., 0].logsumexp(dim=0)
        return Scores(
            values_bt[:, :top], classes_bt[:, :top], log_sum_b, label_logit_B1[share, 0], above_B[share]
        )

    def squared_gradient(self) -> Tensor:
        """Return the square of the gradient's norm over all processes, each weight counted once.

        If it is not finite, the gradients become NaN in every process, so that all of them skip the step.
        """
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        total = _reduced(torch.stack(norms).square().sum())
        for gradient in gradients:
            gradient.add_(total * 0)  # 0, or NaN
        return total

    def counts(self, x: Tensor) -> list[int]:
        """Return the number of images of every process."""
        if self.world_size == 1:
            return [len(x)]
        lengths = torch.empty(self.world_size, dtype=torch.int64)  # between CPUs, without waiting for a GPU
        dist.all_gather(list(lengths.split(1)), torch.tensor([len(x)]))
        return lengths.tolist()

    def extra_repr(self) -> str:
        """The sizes."""
        rows = f"{self.rows.start}-{self.rows.stop} of {self.num_classes}"
        return f"in_features={self.in_features}, classes={rows}, bias={self.bias is not None}"

    def _logits(self, x: Tensor, counts: Sequence[int], averaged: bool = False) -> Tensor:
        kind = x.device.type
        is_half = torch.is_autocast_enabled(kind)
        # Autocast rounds the input of the product, so the rounded features are sent: half the bytes.
        dtype = torch.get_autocast_dtype(kind) if is_half else self.weight.dtype
        factor = self.world_size if averaged else 1
        gathered = _Gather.apply(x, counts, self.rank, factor, dtype)  # type: ignore[no-untyped-call]
        return F.linear(gathered, self.weight, self.bias)


class _Gather(torch.autograd.Function):
    """Gather the features of all processes; the gradient is summed over them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, counts: Sequence[int], rank: int, factor: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.counts, ctx.rank, ctx.factor, ctx.dtype = counts, rank, factor, x.dtype
        return _all_gather(x.to(dtype), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_BD = gradients[0].to(_at_least_float32(gradients[0].dtype))
        own_bD = _reduce_scatter(gradient_BD, ctx.counts, ctx.rank)
        return (own_bD * ctx.factor).to(ctx.dtype), None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of all images from the logits of this process's classes, and the predictions."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_Bk: Tensor,
        classes_Bn: Tensor,
        shares_Bn: Tensor,
        rows: range,
        num_classes: int,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        full_Bk = logits_Bk.to(_at_least_float32(logits_Bk.dtype))
        own_B, place_B = full_Bk.max(dim=1)
        highest_B = _reduced(own_B.clone(), dist.ReduceOp.MAX)
        # Of equal logits the first class is the prediction, as in argmax.
        predicted_B = torch.where(own_B == highest_B, place_B + rows.start, num_classes)
        _reduced(predicted_B, dist.ReduceOp.MIN)
        shifted_Bk = full_Bk - highest_B[:, None]
        target_B = (_picked(shifted_Bk, classes_Bn, rows) * shares_Bn).sum(dim=1)
        # The mean over all classes, not over those of this process.
        mean_B = shifted_Bk.sum(dim=1) / num_classes
        exponentials_Bk = shifted_Bk.exp_()
        total_B, target_B, mean_B = _reduced(torch.stack([exponentials_Bk.sum(dim=1), target_B, mean_B]))
        ctx.rows, ctx.smoothing, ctx.num_classes = rows, smoothing, num_classes
        ctx.dtype = logits_Bk.dtype
        ctx.save_for_backward(exponentials_Bk, total_B, classes_Bn, shares_Bn)
        ctx.mark_non_differentiable(predicted_B)
        return total_B.log() - (1 - smoothing) * target_B - smoothing * mean_B, predicted_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exponentials_Bk, total_B, classes_Bn, shares_Bn = ctx.saved_tensors
        of_loss_B1 = gradients[0][:, None]
        gradient_Bk = exponentials_Bk * (of_loss_B1 / total_B[:, None])
        if ctx.smoothing:
            gradient_Bk -= of_loss_B1 * (ctx.smoothing / ctx.num_classes)
        place_Bn, is_own_Bn = _places(classes_Bn, ctx.rows)
        of_target_Bn = (ctx.smoothing - 1) * shares_Bn * of_loss_B1
        gradient_Bk.scatter_add_(1, place_Bn, torch.where(is_own_Bn, of_target_Bn, 0))
        return gradient_Bk.to(ctx.dtype), None, None, None, None, None


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _places(classes_Bn: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Return the columns of classes, and whether the classes are among the rows at all."""
    place_Bn = classes_Bn - rows.start
    is_own_Bn = (place_Bn >= 0) & (place_Bn < len(rows))
    return place_Bn.clamp(0, len(rows) - 1), is_own_Bn


def _picked(values_Bk: Tensor, classes_Bn: Tensor, rows: range) -> Tensor:
    """Return the values of classes, and 0 for classes of other processes."""
    place_Bn, is_own_Bn = _places(classes_Bn, rows)
    return torch.where(is_own_Bn, values_Bk.gather(1, place_Bn), 0)


def _reduced(values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over all processes, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, operation)
    return values


def _all_gather(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Concatenate the rows of all processes; shorter ones are padded on the way."""
    if len(counts) == 1:
        return x
    longest = max(counts)
    padded = x if len(x) == longest else F.pad(x, (0, 0, 0, longest - len(x)))
    gathered = x.new_empty(len(counts), longest, *x.shape[1:])
    dist.all_gather(list(gathered.unbind()), padded.contiguous())
    if min(counts) == longest:
        return gathered.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _reduce_scatter(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """Sum over all processes, and return the rows of this one.

    Each process sends the others their rows, and adds up those that it receives, in the order of the
    processes. That is a reduce-scatter for shares of any length. The one of gloo sends twice as much.
    """
    if len(counts) == 1:
        return x
    count, world_size = counts[rank], len(counts)
    received = x.new_empty(world_size * count, *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), [count] * world_size, list(counts))
    total: Tensor = received.unflatten(0, (world_size, count)).sum(dim=0)
    return total


@torch.no_grad()
def _draw(weight: Tensor, rows: range, classes: int, bound: float) -> None:
    """Draw uniform values for all classes in blocks, and keep those of ``rows``."""
    step = max(1, BLOCK // max(1, weight[0].numel()))
    for start in range(0, classes, step):
        stop = min(start + step, classes)
        drawn = weight.new_empty(stop - start, *weight.shape[1:]).uniform_(-bound, bound)
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            weight[first - rows.start : last - rows.start] = drawn[first - start : last - start]

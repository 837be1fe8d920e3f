from __future__ import annotations

import numpy as np
import pytest
import torch
import torchmetrics.functional.classification as oracle

from covpool.data.loader import BadImage, Batch
from covpool.inference.forward import Forward
from covpool.processes import Processes
from covpool.training import metrics
from covpool.training.metrics import Predictions, measure

ALONE = Processes(0, 1, torch.device("cpu"))


def predict(
    batches: list[Batch], network: torch.nn.Module | None = None
) -> tuple[Predictions, list[BadImage]]:
    """Predict. By default the network is the identity, so that its logits are the images of the batches."""
    forward = Forward(network or torch.nn.Identity(), device=ALONE.device)
    found = metrics.predict(forward.run(batches), ALONE)
    assert found is not None
    return found


def batches(logits: torch.Tensor, labels: torch.Tensor, size: int) -> list[Batch]:
    ids = torch.arange(len(labels))
    return [
        Batch(logits[i : i + size], labels[i : i + size], ids[i : i + size], ())
        for i in range(0, len(labels), size)
    ]


@pytest.mark.parametrize(("classes", "n"), [(2, 31), (7, 100), (200, 333)])
def test_metrics_are_those_of_torchmetrics(classes: int, n: int) -> None:
    torch.manual_seed(classes)
    labels = torch.randint(classes, (n,))
    logits = torch.randn(n, classes) + 2 * torch.nn.functional.one_hot(labels, classes)
    found = predict(batches(logits, labels, 16))
    measured = measure(found[0], classes)
    assert measured["top1"] == pytest.approx(oracle.multiclass_accuracy(logits, labels, classes, "micro"))
    top5 = oracle.multiclass_accuracy(logits, labels, classes, "micro", top_k=min(5, classes))
    assert measured["top5"] == pytest.approx(top5)
    # torchmetrics also leaves out classes without images and predictions.
    assert measured["macro_f1"] == pytest.approx(oracle.multiclass_f1_score(logits, labels, classes, "macro"))
    present = labels.unique()
    recall = oracle.multiclass_recall(logits, labels, classes, "none")[present].mean()
    assert measured["balanced_accuracy"] == pytest.approx(recall)
    assert measured["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels))
    assert measured["images"] == n


def test_predictions_are_in_the_order_of_the_set() -> None:
    logits, labels = torch.eye(6), torch.arange(6)
    shuffled = [batches(logits, labels, 2)[i] for i in (2, 0, 1)]
    found = predict(shuffled)
    assert found[0].ids.tolist() == found[0].predicted.tolist() == list(range(6))
    probability = torch.eye(6).softmax(dim=1)[0, 0]
    assert np.allclose(found[0].confidence, probability)
    assert np.allclose(found[0].label_confidence, probability)


def test_nothing_to_measure_is_told() -> None:
    bad = BadImage("a.jpg", "unreadable", "it is empty")
    empty = Batch(
        torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), (bad,)
    )
    found = predict([empty])
    assert found[1] == [bad]
    with pytest.raises(ValueError, match="no image is readable"):
        measure(found[0], 3)


def test_a_network_of_nans_has_no_hits() -> None:
    labels = torch.zeros(4, dtype=torch.int64) + 1
    found = predict(batches(torch.full((4, 9), torch.nan), labels, 4))
    measured = measure(found[0], 9)
    assert (measured["top1"], measured["top5"]) == (0, 0)


def test_of_equal_logits_the_first_count() -> None:
    labels = torch.arange(9)
    found = predict(batches(torch.zeros(9, 9), labels, 4))
    measured = measure(found[0], 9)
    assert (measured["top1"], measured["top5"]) == (pytest.approx(1 / 9), pytest.approx(5 / 9))


def test_a_prediction_that_is_stopped_gives_none() -> None:
    asked = iter([False, True, True])
    given = batches(torch.eye(6), torch.arange(6), 2)
    results = Forward(torch.nn.Identity(), device=ALONE.device).run(given, lambda: next(asked))
    assert metrics.predict(results, ALONE, lambda: next(asked)) is None


def test_the_mode_of_the_network_stays() -> None:
    network = torch.nn.Dropout(0.9).train()
    found = predict(batches(torch.eye(6), torch.arange(6), 2), network)
    assert found[0].predicted.tolist() == list(range(6))  # dropout was off
    assert network.training

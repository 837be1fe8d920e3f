"""Upload a bundle to the Hugging Face Hub, with a model card that people can read."""

from __future__ import annotations

import dataclasses
import json
import logging
import ntpath
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covpool.errors import UsageError
from covpool.hub import HUB, HubAddress, explained
from covpool.models.bundle import read_card
from covpool.models.card import CARD, WEIGHTS, Card, parse, write_card
from covpool.models.model import PooledClassifier
from covpool.models.saving import save_model
from covpool.storage.files import read_file, read_text
from covpool.storage.folders import scratch_folder

LOGGER = logging.getLogger("covpool")
README = "README.md"
MARK = "<!-- Written by covpool push. Remove this line, and later pushes keep your text. -->"
MAX_RESULTS = 2**26
# Titles of metrics in the model card, and their types in the metadata of the Hub, where it has one.
METRICS = {
    "top1": ("top-1 accuracy", "accuracy"),
    "top5": ("top-5 accuracy", "accuracy"),
    "macro_f1": ("macro F1", "f1"),
    "balanced_accuracy": ("balanced accuracy", "accuracy"),
    "expected_calibration_error": ("expected calibration error", "expected_calibration_error"),
}
LISTED_CLASSES = 100


def push_to_hub(
    model: PooledClassifier | str | Path,
    repository: str,
    *,
    license: str | None = None,
    dataset: str | None = None,
    results: str | Path | None = None,
    private: bool = False,
) -> str:
    """Upload a model to the Hugging Face Hub, in one commit: weights, ``covpool.json`` and a model card.

    ``huggingface_hub`` finds the token: log in with ``hf auth login``, or set ``HF_TOKEN``. Of absolute paths
    in the recipe, only the last part is uploaded. A ``README.md`` that someone edited is kept.

    Args:
        model: a bundle, or a model from :func:`covpool.create_model`. Only a bundle has metrics and a recipe.
        repository: ``user/name``, or ``user/name@branch``. Both are created if they do not exist.
        license: license of the weights, as the Hub names it: ``"apache-2.0"``, ``"cc-by-nc-4.0"``.
        dataset: data set on the Hub that the model was trained on, ``user/name``.
        results: the folder or the ``results.json`` of ``covpool eval`` for this bundle, whose metrics and
            confidence intervals go into the model card.
        private: create a private repository.

    Returns:
        The address of the commit, for :func:`covpool.load_model`: ``"hf-hub:user/name@commit"``.

    Raises:
        HubError: the Hub refuses the model or does not answer.
        UsageError: results of another model, or a public repository where a private one was asked for.
    """
    address = HubAddress.of(repository)
    if isinstance(model, PooledClassifier):
        with scratch_folder() as folder:
            saved = save_model(model, folder / "bundle")
            return push_to_hub(
                saved, repository, license=license, dataset=dataset, results=results, private=private
            )
    if str(model).startswith(HUB):
        raise UsageError(f"{model} is on the Hub already: pass a folder")
    card = read_card(model)
    if card.file != WEIGHTS:
        raise UsageError(f"{model} has a divided classifier in several files, and cannot be pushed yet")
    card = dataclasses.replace(card, recipe=_without_paths(card.recipe), metrics=_without_paths(card.metrics))
    measured = None if results is None else _results(Path(results), card)
    text = readme(card, address, license=license, dataset=dataset, results=measured)

    from huggingface_hub import CommitOperationAdd, HfApi

    with explained(address):
        api = HfApi(library_name="covpool")
        api.create_repo(address.repository, private=True if private else None, exist_ok=True)
        if private and not api.repo_info(address.repository).private:
            raise UsageError(f"{address.repository} exists and is public: use another name")
        if address.revision:
            api.create_branch(address.repository, branch=address.revision, exist_ok=True)
        files: dict[str, Any] = {CARD: write_card(card), WEIGHTS: str(Path(model, WEIGHTS))}
        if _is_ours(address):
            files[README] = text.encode()
        else:
            LOGGER.warning("%s has a README.md of its own, which is kept: check its figures", address)
        commit = api.create_commit(
            address.repository,
            [CommitOperationAdd(name, content) for name, content in files.items()],
            commit_message="Upload with covpool",
            revision=address.revision or None,
        )
        return str(dataclasses.replace(address, revision=str(commit.oid)))


def _is_ours(address: HubAddress) -> bool:
    """Return whether the model card may be replaced: there is none, or covpool wrote it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = hf_hub_download(address.repository, README, revision=address.revision or None)
    except EntryNotFoundError as error:
        if error.__cause__ is not None and not hasattr(error, "response"):
            raise  # not answered, and not in the cache
        return True
    return MARK in read_text(path, MAX_RESULTS, errors="replace")


def _results(path: Path, card: Card) -> dict[str, Any]:
    path = path / "results.json" if path.is_dir() else path
    measured = parse(read_file(path, MAX_RESULTS), str(path), MAX_RESULTS)
    if measured.get("protocol") != "accuracy":
        raise UsageError(f"{path} has no results of covpool eval")
    if measured["bundle"]["sha256"] != card.sha256:
        raise UsageError(f"{path} has the results of another model: run covpool eval with this bundle")
    return measured


def _without_paths(value: Any) -> Any:
    """Return a value of JSON with the last part only of absolute paths, which name people and machines."""
    if isinstance(value, str):
        is_path = posixpath.isabs(value) or ntpath.isabs(value) or value.startswith("~")
        return ntpath.basename(value.rstrip("/\\")) if is_path else value
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_without_paths(item) for item in value]
    return value


def readme(
    card: Card,
    address: HubAddress,
    *,
    license: str | None = None,
    dataset: str | None = None,
    results: Mapping[str, Any] | None = None,
) -> str:
    """Return the model card: metadata of the Hub, use, metrics with intervals, data and provenance."""
    from huggingface_hub import EvalResult, ModelCardData

    config, name = card.config, address.repository.partition("/")[2]
    url = f"{HUB}{address.repository}"
    data = _data(card, dataset)
    rows = _metrics(results)
    evaluated = [
        EvalResult(
            task_type="image-classification",
            dataset_type=dataset or "private",
            dataset_name=data,
            metric_type=METRICS[key][1] if key in METRICS else key,
            metric_name=_title(key),
            metric_value=value,
        )
        for key, value, _ in rows
    ]
    metadata = ModelCardData(
        license=license,
        library_name="covpool",
        pipeline_tag="image-classification",
        tags=["covpool", "timm", "covariance-pooling", "image-classification"],
        datasets=[dataset] if dataset else None,
        model_name=name if evaluated else None,
        eval_results=evaluated or None,
    )
    facts = {
        "backbone": f"`{config.backbone}` (timm)",
        "initial weights": ", ".join(f"{k} {v}" for k, v in card.initial_weights.items()) or "not recorded",
        "pooling": f"`{config.pool}`" + (f", {config.dim} channels" if config.dim else ""),
        "input": "×".join(map(str, card.preprocessing["input_size"])),
        "classes": f"{config.num_classes:,}",
        "license": license or "not stated: ask the authors before you use the weights",
        "SHA-256 of the weights": f"`{card.sha256}`",
        "SHA-256 of the backbone": f"`{card.backbone_sha256}`",
        "versions": ", ".join(f"{key} {value}" for key, value in sorted(card.versions.items())),
    }
    return "\n".join(
        [
            f"---\n{metadata.to_yaml().strip()}\n---\n{MARK}\n\n# {name}\n",
            f"A classifier of {config.num_classes:,} classes: a `{config.backbone}` backbone with "
            f"`{config.pool}` pooling, made with covpool.\n",
            "## Use\n",
            f"```sh\npip install 'covpool[eval,hub]'\ncovpool predict {url} photos\n```\n",
            "```python\nimport covpool\n",
            f'model = covpool.load_model("{url}")',
            'model.predict("photo.jpg")\n```\n',
            f'To pin a version, append its commit: `"{url}@COMMIT"`. Loading runs no code of this '
            "repository, and checks the SHA-256 of the weights.\n",
            *_table_of_metrics(rows, results, card),
            f"## Training data\n\n{data}\n",
            "## Facts\n\n| | |\n|---|---|",
            *(f"| {key} | {value} |" for key, value in facts.items()),
            *_classes(card),
            *_recipe(card),
            "",
        ]
    )


def _data(card: Card, dataset: str | None) -> str:
    """Return the name of the training data."""
    if dataset:
        return dataset
    path = (card.recipe.get("data") or {}).get("path") if isinstance(card.recipe.get("data"), dict) else None
    return str(path) if path else "not recorded"


def _metrics(results: Mapping[str, Any] | None) -> list[tuple[str, float, list[float] | None]]:
    if results is None:
        return []
    metrics, ends = results["metrics"], results["intervals"]
    listed = dict.fromkeys((*METRICS, *ends))
    return [(key, metrics[key], ends.get(key)) for key in listed if metrics.get(key) is not None]


def _title(key: str) -> str:
    return METRICS[key][0] if key in METRICS else key.replace("_", " ")


def _table_of_metrics(
    rows: list[tuple[str, float, list[float] | None]], results: Mapping[str, Any] | None, card: Card
) -> list[str]:
    if results is None:
        numbers = {key: card.metrics[key] for key in METRICS if isinstance(card.metrics.get(key), float)}
        listed = ", ".join(f"{METRICS[key][0]} {value:.4f}" for key, value in numbers.items())
        return [f"## Metrics\n\nReported by training, on its validation images: {listed or 'none'}.\n"]
    level, split = results["bootstrap"]["level"], results["data"]["split"]
    return [
        f"## Metrics\n\nMeasured by `covpool eval` on {results['images']:,} images of the split {split}, "
        f"{results['date'][:10]}.\n",
        f"| metric | value | {level:.0%} interval |\n|---|---|---|",
        *(
            f"| {_title(key)} | {value:.4f} | " + (f"{ends[0]:.4f} to {ends[1]:.4f} |" if ends else "|")
            for key, value, ends in rows
        ),
        "",
    ]


def _classes(card: Card) -> list[str]:
    if not card.classes:
        return []
    more = f" and {len(card.classes) - LISTED_CLASSES:,} more" if len(card.classes) > LISTED_CLASSES else ""
    return [f"\n## Classes\n\n{', '.join(card.classes[:LISTED_CLASSES])}{more}"]


def _recipe(card: Card) -> list[str]:
    if not card.recipe:
        return []
    text = json.dumps(card.recipe, indent=2, ensure_ascii=False)
    summary = "<details><summary>All settings of the training run</summary>"
    return [f"\n## Recipe\n\n{summary}\n\n```json\n{text}\n```\n\n</details>"]

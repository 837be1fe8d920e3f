"""Bundles and timm's networks on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from covpool.durable import read_folder
from covpool.errors import BundleError, DamagedBundleError, HubError
from covpool.hub import COMMIT, HUB, Address
from covpool.models.card import CARD, WEIGHTS, check_backbone_options

T = TypeVar("T")
CONFIG = "config.json"  # of timm's repositories


def located(bundle: str | Path, read: Callable[[Path], T]) -> T:
    """Read a bundle in a folder, or the copy on this disk of one on the Hub."""
    if not str(bundle).startswith(HUB):
        return read_folder(bundle, read)
    address = Address.of(str(bundle))
    try:
        return read(download(address))
    except DamagedBundleError:  # the copy, perhaps, and not the original
        return read(download(address, again=True))


def pinned(bundle: str | Path) -> str:
    """Return how another process finds the same bundle: its absolute path, or its address with a commit."""
    if not str(bundle).startswith(HUB):
        return str(Path(bundle).resolve())
    address = Address.of(str(bundle))
    is_pinned = COMMIT.fullmatch(address.revision)
    return str(address if is_pinned else replace(address, revision=download(address).name))


def download(address: Address, *, again: bool = False) -> Path:
    """Return the folder of a bundle in the cache, after downloading the files that are not there."""
    card = address.file(CARD, again=again)
    # The weights of the same commit, even if another is pushed meanwhile.
    replace(address, revision=card.parent.name).file(WEIGHTS, again=again)
    return card.parent


def timm_backbone(text: str, *, weights: bool) -> tuple[str, dict[str, Any], dict[str, Any], Address]:
    """Read a repository of timm's ``push_to_hf_hub``.

    Args:
        text: the address.
        weights: download the weights too. Only ``model.safetensors`` is read: a pickle could run code.

    Returns:
        The name of the network, its options, its ``pretrained_cfg``, and the address with its commit.
    """
    from timm.models._hub import _parse_model_cfg, load_cfg_from_json

    address = Address.of(text)
    config = address.file(CONFIG)
    address = replace(address, revision=config.parent.name)
    try:
        settings, name, options = _parse_model_cfg(load_cfg_from_json(config), {})
        options = {key: options[key] for key in options if key not in ("num_classes", "global_pool")}
        check_backbone_options(options)
    except (AttributeError, BundleError, KeyError, TypeError, ValueError) as error:
        raise HubError(f"{address}: its {CONFIG} does not describe a network of timm: {error}") from None
    settings = {key: value for key, value in settings.items() if key not in ("url", "hf_hub_id", "file")}
    if weights:
        settings["file"] = str(address.file(WEIGHTS))
    return name, options, settings, address

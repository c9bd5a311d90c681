"""Push an export to the hub, with a card of how the weights came to be."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import CheckpointError, ConfigError, one_line
from ..load import Checkpoint
from ..weights import open_weights
from .hugging_face import check_target, export_hugging_face
from .model_card import MARK, model_card

CARD = "README.md"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_STALE = re.compile(r"(model|pytorch_model)[^/]*\.(safetensors|bin)(\.index\.json)?")
"""Weights of an earlier push: from_pretrained would take them before the new ones if their number of files differs."""


class Pushed(NamedTuple):
    """What was pushed.

    Attributes:
        url: of the commit.
        files: of the folder.
    """

    url: str
    files: list[Path]


def push_to_hub(
    checkpoint: Checkpoint | str | os.PathLike[str],
    repository: str,
    *,
    license: str,
    folder: str | os.PathLike[str] | None = None,
    datasets: Sequence[str] = (),
    private: bool | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    **options: Any,
) -> Pushed:
    """Export a checkpoint of a model of transformers, and push it to the hub with a card; call it in one process.

    The card says what the checkpoint and its work directory know: data, recipe, strategy, metrics and versions. A README.md that is in
    the folder is pushed instead, and one on the hub stays if flextrain has not written it. Weights of an earlier push are removed in
    the same commit; nothing else on the hub is touched, and nothing else in the folder is pushed.

    Args:
        checkpoint: see ``export_hugging_face``.
        repository: "NAME", or "ORGANISATION/NAME"; made if it does not exist.
        license: of the weights, an identifier of the hub such as "apache-2.0"; "other" with a text of your own in README.md.
        folder: where to export to, which stays; None: a temporary folder.
        datasets: names of data sets on the hub, for the card.
        private: whether a new repository is private; None: as the account or organisation has it.
        token: with the right to write; None: that of the machine, by HF_TOKEN or ``hf auth login``.
        endpoint: of the hub; None: HF_ENDPOINT, or that of Hugging Face.
        options: further arguments of ``export_hugging_face``.

    Raises:
        ConfigError: an argument is wrong, the machine is offline by its settings, or huggingface_hub is not installed.
        CheckpointError: the hub cannot be reached, or refuses; or the checkpoint cannot be exported.
    """
    api = _api(repository, license, token, endpoint)
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    if folder is not None:
        check_target(Path(folder), **{key: options.get(key) for key in ("tokenizer", "max_shard_size")})
    with _refusals(repository, api.endpoint):
        account = api.whoami()["name"]
    with ExitStack() as stack:
        target = Path(stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder)
        files = export_hugging_face(source, target, **options)
        card = target / CARD
        if not card.exists():
            name = repository.rpartition("/")[2]
            card.write_text(model_card(source, name, license=license, datasets=datasets), encoding="utf-8")
        full_name = repository if "/" in repository else f"{account}/{repository}"
        with _refusals(
            repository, api.endpoint, "" if folder is None else f"; hf upload {full_name} {target} tries it again"
        ):
            url = _commit(api, full_name, target, [*files, card], private)
    return Pushed(url, [*files, card])


def _api(repository: str, license: str, token: str | None, endpoint: str | None) -> Any:
    """The client of the hub.

    Raises:
        ConfigError: an argument is wrong, there is no client, or it must not go online.
    """
    if not _NAME.fullmatch(repository):
        raise ConfigError(f'push: "{repository}" is not allowed, give NAME or ORGANISATION/NAME')
    if not _LICENSE.fullmatch(license):
        raise ConfigError(f'push.license: "{license}" is not allowed, give an identifier of the hub such as apache-2.0')
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"push: needs the package huggingface_hub ({error}), pip install flextrain[hf]") from None
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ConfigError(f"push: HF_HUB_OFFLINE is set, unset it to push to {repository}")
    return huggingface_hub.HfApi(endpoint=endpoint, token=token)


def _commit(api: Any, repository: str, folder: Path, files: Sequence[Path], private: bool | None) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api.create_repo(repository, private=private, exist_ok=True)
    names = {path.relative_to(folder).as_posix(): path for path in files}
    there = set(api.list_repo_files(repository))
    if CARD in there and MARK not in _text(api, repository):
        del names[CARD]
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in names.items()]
    operations += [CommitOperationDelete(name) for name in sorted(there - names.keys()) if _STALE.fullmatch(name)]
    return str(api.create_commit(repository, operations, commit_message="Weights exported by flextrain").commit_url)


def _text(api: Any, repository: str) -> str:
    """The card on the hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    address = hf_hub_url(repository, CARD, endpoint=api.endpoint)
    response = get_session().get(address, headers=build_hf_headers(token=api.token))
    hf_raise_for_status(response)
    return str(response.text)


@contextmanager
def _refusals(repository: str, endpoint: str, again: str = "") -> Iterator[None]:
    """Let what the hub or the network refuses be one line, with ``again`` at its end."""
    from huggingface_hub.errors import HfHubHTTPError

    of_transport: Any = HfHubHTTPError.__bases__[0]  # HTTPError of the client library, which differs between versions
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "; give a token that may write to it, HF_TOKEN or hf auth login" if status in (401, 403) else ""
        said = error.server_message or one_line(error)
        raise CheckpointError(
            f"push: {endpoint} refuses {repository}, {status}: {one_line(said)}{advice}{again}"
        ) from error
    except (OSError, ValueError, RuntimeError, of_transport) as error:
        raise CheckpointError(f"push: {repository} was not pushed to {endpoint}, {one_line(error)}{again}") from error

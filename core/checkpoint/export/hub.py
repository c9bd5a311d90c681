"""Push an export to the hub, with a card of how the weights came to be."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from ...base.errors import CheckpointError, ConfigError, FlexTrainError, one_line
from ..load import Checkpoint
from ..weights import open_weights
from .files import local_folder
from .hugging_face import check_target, export_hugging_face
from .model_card import MARK, model_card

CARD = "README.md"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_STALE = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|adapter_config\.json|adapter_model\.(safetensors|bin)"
)
"""What an earlier push may have left: from_pretrained would take other weights before the new ones, or add an adapter to them."""


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
    **options: Any,
) -> Pushed:
    """Export a checkpoint of a model of transformers, and push it to the hub with a card; call it in one process.

    The card says what the checkpoint and its work directory know: data, recipe, strategy, metrics and versions. A README.md of your
    own, in the folder or on the hub, takes its place. Weights and adapters of an earlier push are removed in the same commit; nothing
    else on the hub is touched, and nothing else in the folder is pushed.

    Args:
        checkpoint: see ``export_hugging_face``.
        repository: "NAME", or "ORGANISATION/NAME"; made if it does not exist.
        license: of the weights, an identifier of the hub such as "apache-2.0"; "other" with a text of your own in README.md.
        folder: where to export to, which stays; None: a temporary folder.
        datasets: names of data sets on the hub, for the card.
        private: whether the repository is private; None: as it is, and a new one as the account or organisation has it.
        token: with the right to write; None: that of the machine, by HF_TOKEN or ``hf auth login``.
        options: further arguments of ``export_hugging_face``.

    Raises:
        ConfigError: an argument is wrong or differs from what is on the hub, the machine is offline by its settings, or
            huggingface_hub is not installed.
        CheckpointError: the hub cannot be reached, or refuses; or the checkpoint cannot be exported.
    """
    api = _api(repository, license, token)
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_weights(checkpoint)
    if folder is not None:
        check_target(local_folder(folder), **{key: options.get(key) for key in ("tokenizer", "max_shard_size")})
    with _refusals(repository, api.endpoint):
        account = api.whoami()["name"]
        full_name = repository if "/" in repository else f"{account}/{repository}"
        on_hub = _card_on_hub(api, full_name, private)
    in_folder = (
        "" if folder is None or not Path(folder, CARD).exists() else Path(folder, CARD).read_text(encoding="utf-8")
    )
    own = next((text for text in (in_folder, on_hub) if text and MARK not in text), "")
    card = own or model_card(source, repository.rpartition("/")[2], license=license, datasets=datasets)
    with _refusals(repository, api.endpoint):
        _check_card(card, license, datasets)
    with ExitStack() as stack:
        target = Path(stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder)
        files = export_hugging_face(source, target, **options)
        if not own:
            (target / CARD).write_text(card, encoding="utf-8")
        if card != on_hub:
            files.append(target / CARD)
        again = "" if folder is None else f"; hf upload {full_name} {target} tries it again"
        with _refusals(repository, api.endpoint, again):
            api.create_repo(full_name, private=private, exist_ok=True)
            return Pushed(_commit(api, full_name, target, files), files)


def _api(repository: str, license: str, token: str | None) -> Any:
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
    return huggingface_hub.HfApi(token=token)


def _card_on_hub(api: Any, repository: str, private: bool | None) -> str:
    """The text of the repository's card; empty if it has none, or does not exist yet.

    Raises:
        ConfigError: the repository is not as private as it shall be.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repository)
    except RepositoryNotFoundError:
        return ""
    if private is not None and info.private is not private:
        kinds = {True: "private", False: "public"}
        raise ConfigError(
            f"push.private: {repository} is {kinds[not private]}, make it {kinds[private]} on the hub or leave private out"
        )
    if CARD not in [file.rfilename for file in info.siblings or ()]:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        return Path(api.hf_hub_download(repository, CARD, local_dir=folder)).read_text(encoding="utf-8")


def _check_card(text: str, license: str, datasets: Sequence[str]) -> None:
    """Check a card, which may be by hand, against the arguments, and let the hub check it.

    Raises:
        ConfigError: it says something else.
        ValueError: the hub does not know something that it says.
    """
    import huggingface_hub
    import yaml
    from huggingface_hub import ModelCard

    try:
        card = ModelCard(text, ignore_metadata_errors=True)
    except yaml.YAMLError as error:
        raise ConfigError(f"push: your {CARD} has a head that is no YAML, {one_line(error)}") from None
    for key, given in (("license", [license]), ("datasets", datasets)):
        said = getattr(card.data, key, None) or []
        said = [said] if isinstance(said, str) else said
        if lacking := [name for name in given if name not in said]:
            raise ConfigError(
                f'push.{key}: "{lacking[0]}" is not what your {CARD} says, {", ".join(said) or "nothing"}; let both say the same'
            )
    # Earlier ones ask huggingface.co, whatever hub it is; the commit is checked by the right one.
    if Version(huggingface_hub.__version__) >= Version("2"):
        card.validate()


def _commit(api: Any, repository: str, folder: Path, files: Sequence[Path]) -> str:
    """Push files of a folder, and remove what is stale; return the address of the commit."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    names = {path.relative_to(folder).as_posix(): path for path in files}
    stale = {name for name in api.list_repo_files(repository) if _STALE.fullmatch(name)} - names.keys()
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in names.items()]
    operations += [CommitOperationDelete(name) for name in sorted(stale)]
    return str(api.create_commit(repository, operations, commit_message="Weights exported by flextrain").commit_url)


@contextmanager
def _refusals(repository: str, endpoint: str, again: str = "") -> Iterator[None]:
    """Let what the hub or the network refuses be one line, with ``again`` at its end."""
    from huggingface_hub.errors import HfHubHTTPError

    of_transport: Any = HfHubHTTPError.__bases__[0]  # HTTPError of the client library, which differs between versions
    try:
        yield
    except FlexTrainError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "; give a token that may write to it, HF_TOKEN or hf auth login" if status in (401, 403) else ""
        said = error.server_message or one_line(error)
        raise CheckpointError(
            f"push: {endpoint} refuses {repository}, {status}: {one_line(said)}{advice}{again}"
        ) from error
    except (OSError, ValueError, RuntimeError, of_transport) as error:
        raise CheckpointError(f"push: {repository} was not pushed to {endpoint}, {one_line(error)}{again}") from error

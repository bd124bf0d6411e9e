"""Names of models on Hugging Face's hub: whether one is there, asked before anything is loaded."""

from difflib import get_close_matches

from workers.errors import ModelRefused

CONFIG = "config.json"
# A hub that is slow is left to whoever loads the model, who is more patient.
_SECONDS = 2.0


def check_hub_model(name: str) -> None:
    """Raise ModelRefused where a model is neither in the hub's cache nor on the hub.

    Does nothing where the hub's library is not installed, or the hub is slow.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        return
    if isinstance(hub.try_to_load_from_cache(name, CONFIG), str):
        return
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, CONFIG), timeout=_SECONDS)
    except errors.GatedRepoError as error:
        raise ModelRefused(
            f"{name} is on the hub, but only for those who accepted its terms: accept them on its "
            "page there, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelRefused(
            f"the hub has no model {name}, or a private one: check the name, or log in with "
            f"`hf auth login`{_suggest(name)}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelRefused(
            f"{name} is on the hub, but has no {CONFIG}: of a repository of GGUF files, download one "
            "and name the file"
        ) from error
    except Exception as error:  # of the HTTP library that the hub's has: it has changed twice
        if "timeout" in type(error).__name__.lower():
            return
        raise ModelRefused(
            f"{name} is not on this machine, and the hub cannot be asked ({error}){_suggest(name)}; "
            "smollm2 and reference need no hub"
        ) from error


def list_cached() -> list[tuple[str, int, str]]:
    """The models of the hub's cache: names, bytes and folders; none where there is no cache."""
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ModuleNotFoundError:
        return []
    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (each.repo_id, each.size_on_disk, str(each.repo_path))
        for each in found
        if each.repo_type == "model"
    )


def _suggest(name: str) -> str:
    near = get_close_matches(name, [cached for cached, _, _ in list_cached()], 1)
    return f"; did you mean {near[0]}, which is here?" if near else ""

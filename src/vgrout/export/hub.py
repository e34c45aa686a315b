"""A folder to the Hugging Face hub, by its own client."""

from pathlib import Path


def require_token(repo: str) -> None:
    """Raises ValueError, one line, if `repo` is no repository id or nobody is logged in. Nothing is sent."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as e:
        raise ValueError(f"--push-to-hub {repo}: {' '.join(str(e).split())}") from None
    if get_token() is None:
        raise ValueError(f"--push-to-hub {repo}: not logged in; set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repo: str, kind: str, message: str) -> str:
    """Upload the folder into a repository, created private if there is none. Returns its address.

    kind: "model" or "dataset".

    Raises:
        ValueError: one line: the hub did not take it. The folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(repo, repo_type=kind, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=url.repo_id, repo_type=kind, commit_message=message)
    except (HfHubHTTPError, OSError) as e:
        why = " ".join(str(e).split())
        raise ValueError(f"--push-to-hub {repo}: the hub did not take it ({why}); {folder} is written") from None
    return str(url)

"""Where data lies: paths given on the command line, and the folder of `--data-dir`."""

from pathlib import Path

from neumann.lab.errors import UsageError

DEFAULT_FOLDER = Path("data")


def folder_of(data_dir: Path | None) -> Path:
    """The folder of the data sets: what was given, or `data` in the current directory."""
    return DEFAULT_FOLDER if data_dir is None else data_dir


def find(given: str, data_dir: Path | None, example: str) -> Path:
    """The file or folder `given`, from the current directory or from `data_dir`.

    Args:
        given: a path, absolute or not.
        data_dir: where to look as well.
        example: how a right name would look, for the error where there is nothing.
    """
    if not given:
        raise UsageError(f"the path after the colon is missing; it should look like {example}")
    path = Path(given).expanduser()
    places = [path] if path.is_absolute() else [path, folder_of(data_dir) / path]
    for place in places:
        if place.exists():
            return place
    looked = " and ".join(str(place) for place in places)
    advice = "" if path.is_absolute() else "; --data-dir names another folder to look in"
    raise UsageError(f"{given} was not found: looked for {looked}{advice}")

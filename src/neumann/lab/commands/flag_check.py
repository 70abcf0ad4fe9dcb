"""Check the words of a command line, before anything is imported that takes long.

Whatever is wrong is a UsageError of one line, which names the flag.
"""

from collections.abc import Sequence

from neumann.lab.commands.flag_advice import describe_unknown_flag
from neumann.lab.commands.flags import Flag, list_flags
from neumann.lab.errors import UsageError, unknown

MISSING = {  # what is said of a flag without its value; of others that it needs one
    "--arms": "must name at least one optimizer; --arms help lists them",
    "--opt": "needs a value; --opt help lists the optimizers",
    "--set": "needs a value, such as --set epochs=1",
    "--config": "needs a file",
    "--allow-code": "needs MODULE:FUNCTION",
}


def check_words(command: str, words: Sequence[str]) -> None:
    """Raise a UsageError for a word that is no flag, and for values that are missing or wrong."""
    try:
        flags = list_flags(command)
    except FileNotFoundError:  # this package was installed without its source
        return
    known = {form: flag for flag in flags if not flag.is_argument for form in flag.forms}
    arguments = sum(flag.is_argument for flag in flags)  # that may still come
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":  # what follows are arguments, whatever they look like
            if len(rest) > arguments:
                raise _make_unexpected_error(command, rest[arguments])
            return
        given, equals, value = word.partition("=")
        name = given.replace("_", "-")
        if name in known and not known[name].setting:
            name = given  # only settings may be written with underscores
        if not _starts_with_dash(word):
            if not arguments:
                raise _make_unexpected_error(command, word)
            arguments -= 1
        elif name not in known:
            raise describe_unknown_flag(command, given, flags)
        elif not known[name].metavar:
            if equals:
                raise _make_unexpected_error(command, value)
        else:
            values = [value] if equals else []
            while rest and not _starts_with_dash(rest[0]) and (known[name].several or not values):
                values.append(rest.pop(0))
            _check_values(known[name], values)


def _starts_with_dash(word: str) -> bool:
    """Whether a word is meant as a flag; negative numbers and what begins like one are not."""
    if not word.startswith("--") and not (word.startswith("-") and word[1:2].isalpha()):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _check_values(flag: Flag, values: Sequence[str]) -> None:
    name = flag.names[0]
    if not values and (not flag.several or name in MISSING):
        raise UsageError(f"{name} {MISSING.get(name, 'needs a value')}")
    for value in values:
        if flag.choices and value not in flag.choices:
            raise unknown(name, value, flag.choices)
        if flag.kind in (int, float):
            try:
                flag.kind(value)
            except ValueError:
                number = "a whole number" if flag.kind is int else "a number"
                raise UsageError(f"{name} must be {number}, got {value!r}") from None


def _make_unexpected_error(command: str, word: str) -> UsageError:
    return UsageError(f"unexpected argument {word!r}; neumann {command} --help lists the flags")

"""Text from outside made safe for a terminal: a file name or a message may hold anything."""


def printable(text: object) -> str:
    r"""Return one line of ``text`` whose control characters are spelled out, e.g. ``\x1b``.

    That covers newlines, ANSI sequences, direction marks and halves of broken Unicode.
    """
    return "".join(map(_spell, str(text)))


def printable_lines(text: object) -> str:
    """Return ``text`` like :func:`printable`, line by line, for tracebacks; tabs become spaces."""
    lines = str(text).replace("\r\n", "\n").expandtabs(4).split("\n")
    return "\n".join(map(printable, lines))


def _spell(character: str) -> str:
    if character.isprintable() or character == "\N{NO-BREAK SPACE}":
        return character
    return character.encode("unicode_escape").decode("ascii")

"""Quantities as people read them: bytes and seconds."""


def format_bytes(count: int) -> str:
    """Return ``count`` bytes with a decimal unit, e.g. ``1.2 MB`` for 1_234_567."""
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as ``0.8 s``, ``42 s``, ``3 min 05 s`` or ``2 h 04 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"

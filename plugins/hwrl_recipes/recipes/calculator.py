"""The tools of a recipe."""


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract a whole number from another one.

    Args:
        a: The number from which to subtract.
        b: The number to subtract.
    """
    return a - b

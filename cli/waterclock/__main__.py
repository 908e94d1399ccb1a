"""``waterclock``: the command."""

from waterclock.app import app


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

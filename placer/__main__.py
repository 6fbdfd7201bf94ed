"""``python -m placer`` is the ``placer`` command."""

from placer.cli.main import main

if __name__ == "__main__":
    main()

"""The ``placer`` command: a file per subcommand, named like it; `main` finds them."""

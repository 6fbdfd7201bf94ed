"""The ``placer`` command. Every subcommand has a file of the same name, which `main` imports."""

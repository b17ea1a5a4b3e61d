"""The ``gradred`` command. Standard library only; nothing here imports the native part."""

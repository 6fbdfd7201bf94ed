"""What goes wrong on one rank: found, told to the others, and said with stage and layer."""

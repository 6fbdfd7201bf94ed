"""How the processes of a job find each other, which part of the plan each has, and whether all call alike."""

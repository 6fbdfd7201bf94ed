"""The processes of a job: how they find each other, divide the plan, and check each other's calls."""

"""What the tests share: jobs of several ranks, launches of their own, the plan of a whole run."""

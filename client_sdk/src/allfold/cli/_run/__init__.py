"""``allfold run``: the ranks of a job, their output, their ends, and what is asked meanwhile."""

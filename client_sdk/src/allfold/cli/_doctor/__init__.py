"""``allfold doctor``: what is wrong on this machine, with the services, and between the nodes."""

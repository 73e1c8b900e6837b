"""``allfold config``: every setting, its value here, and where that comes from."""

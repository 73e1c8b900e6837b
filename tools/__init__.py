"""Tools for people who work on Allfold: what is made from the code, and how large that may be."""

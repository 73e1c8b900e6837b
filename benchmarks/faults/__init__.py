"""The time from a fault to the next finished op on all survivors, beside other libraries.

Fleet, faults and logs are those of the chaos runs in ``chaos``.
"""

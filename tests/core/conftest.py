"""Settings of the property tests."""

from hypothesis import HealthCheck, settings

# Deadlines per example measure how busy the machine is, not the code.
settings.register_profile("core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")

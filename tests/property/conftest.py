"""How many models are drawn: a few, always the same, in CI; 500 by ``--hypothesis-profile=nightly``.

``pytest tests/property --hypothesis-profile=nightly``
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "placer-ci",
    max_examples=8,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "nightly", max_examples=500, deadline=None, print_blob=True, suppress_health_check=_SLOW
)
if settings.get_current_profile_name() != "nightly":
    settings.load_profile("placer-ci")

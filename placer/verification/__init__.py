"""Compares everything that a caller can see of a placed model with the same of the plain model.

``observation`` turns what can be seen after a call into one flat mapping, and compares two of them;
``situations`` lists the ways in which both models are called, and runs one of them; ``verdict`` runs all.
"""

from placer.verification.observation import Comparison, Observation, Seen
from placer.verification.verdict import Outcome, Verification, verify

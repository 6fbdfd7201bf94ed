"""The model zoo: models of public libraries, captured, planned, placed and compared with the plain model."""

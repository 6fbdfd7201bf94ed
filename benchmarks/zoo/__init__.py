"""The model zoo: what people bring, captured, planned, placed and compared with eager."""

"""What all tests share."""

collect_ignore = ["doubles"]  # stand-ins for packages that cannot run here: imported by the tests that ask for them

"""The tests; a package so that worker processes can import tests.fakes."""

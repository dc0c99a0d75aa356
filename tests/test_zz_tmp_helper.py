from tests.conftest import *
def test_a(cosmo_data): pass
def test_b(era5_data): pass

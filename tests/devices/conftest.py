"""Each test that takes `there` runs on every provider of devices, or says why it cannot."""

import pytest
from devices_here import CUDA, WEBGPU, There


@pytest.fixture(
    params=[pytest.param(it, id=it.name, marks=it.marks) for it in (WEBGPU, CUDA)], scope="session"
)
def there(request: pytest.FixtureRequest) -> There:
    """The provider on which a test runs."""
    found: There = request.param
    return found

"""Options about roles: what an arm that groups parameters by role refuses."""

import pytest

from neumann.lab.errors import UsageError
from neumann.lab.optimizers.arms import Arm, check_arm


@pytest.mark.parametrize("arm", ["neumann-spectral:rest_lr=0.01", "neumann-spectral:rest_lr=x"])
def test_the_rate_of_the_rest_is_given_as_multiples(arm):
    with pytest.raises(UsageError) as error:
        check_arm(Arm.parse(arm))
    expected = "it has no rest_lr, but multiples of lr for roles: embedding, output and vector"
    assert str(error.value) == f"{arm}: {expected}, as in output=2"
    check_arm(Arm.parse("neumann-spectral:embedding=0.5,output=2,vector=2"))

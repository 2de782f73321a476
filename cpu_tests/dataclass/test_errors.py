import pickle

from scalerun.dataclass.errors import ConfigError, UserError


def test_the_field_that_is_to_blame_goes_where_the_error_goes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("--n is 0; give 1", param="n")))
    assert (str(error), error.param, error.exit_code) == ("--n is 0; give 1", "n", 2)
    assert UserError("no file").param is None

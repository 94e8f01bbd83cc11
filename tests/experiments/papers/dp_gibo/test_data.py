"""Data of the SVR experiment: the format UCI publishes, scaling by public records, and a missing file."""

import traceback

import numpy as np
import pytest

from dpray.experiments.papers.dp_gibo.data import CT_FILES, ct_slices, regression
from dpray.platform.datasets import DatasetDamaged, DatasetMissing

RNG = np.random.default_rng(0)


def csv(folder, records=40, *, width=384, secret=None):
    """A file as UCI has it: patientId, value0 … value383, reference."""
    x, y = RNG.random((records, width)).round(4), RNG.uniform(0, 180, records).round(3)
    lines = [",".join(["patientId", *(f"value{index}" for index in range(width)), "reference"])]
    lines += [
        ",".join(map(str, [index // 10, *row, target])) for index, (row, target) in enumerate(zip(x, y, strict=True))
    ]
    if secret is not None:
        lines[3] = lines[3].replace(str(x[2, 0]), secret, 1)
    (folder / CT_FILES[0]).write_text("\n".join(lines))
    return x, y


class TestCTSlices:
    def test_the_published_table_is_read_without_the_patients(self, tmp_path):
        x, y = csv(tmp_path)

        found_x, found_y, source = ct_slices(tmp_path)

        assert (found_x == x).all()
        assert (found_y == y).all()
        assert "part" not in source

    def test_the_part_at_hand_is_read_and_said_to_be_a_part(self, ct_folder):
        x, y, source = ct_slices(ct_folder)

        assert x.shape == (682, 384)
        assert y.min() >= 0
        assert y.max() <= 180
        assert "682 records only" in source

    def test_the_whole_comes_before_the_part(self, tmp_path):
        csv(tmp_path, 12)
        np.savez(tmp_path / CT_FILES[1], x=np.zeros((3, 384)), y=np.zeros(3))

        assert len(ct_slices(tmp_path)[0]) == 12

    def test_a_folder_without_it_says_how_to_get_it(self, tmp_path, monkeypatch):
        with pytest.raises(DatasetMissing, match=r"slice_localization_data\.csv.*archive\.ics\.uci\.edu"):
            ct_slices(tmp_path)
        monkeypatch.delenv("DPRAY_DATA", raising=False)
        with pytest.raises(DatasetMissing, match="No folder was named"):
            ct_slices()

    def test_damage_is_told_without_a_value(self, tmp_path):
        csv(tmp_path, secret="secret")

        with pytest.raises(DatasetDamaged) as caught:
            ct_slices(tmp_path)

        assert "secret" not in "".join(traceback.format_exception(caught.value))

    def test_another_width_is_damage(self, tmp_path):
        np.savez(tmp_path / CT_FILES[1], x=np.zeros((3, 20)), y=np.zeros(3))

        with pytest.raises(DatasetDamaged, match="384 finite features"):
            ct_slices(tmp_path)


class TestRegression:
    def test_training_records_have_mean_0_and_deviation_1(self, tmp_path):
        csv(tmp_path)

        found = regression("ct_slices", features=10, train=25, folder=tmp_path)

        assert found.x_train.shape == (25, 10)
        assert found.x_users.shape == (15, 10)
        for part in (found.x_train, found.y_train):
            assert part.mean(axis=0) == pytest.approx(0.0, abs=1e-9)
            assert part.std(axis=0) == pytest.approx(1.0)

    def test_users_do_not_move_the_scale(self, tmp_path):
        """A user's record enters nobody's features but its own."""
        csv(tmp_path)
        x, y = (part.copy() for part in ct_slices(tmp_path)[:2])
        before = regression("ct_slices", features=10, train=25, folder=tmp_path)
        of_a_user = int(np.random.default_rng([0, 206]).permutation(40)[25])
        x[of_a_user], y[of_a_user] = 1e6, 1e6
        (tmp_path / CT_FILES[0]).unlink()
        np.savez(tmp_path / CT_FILES[1], x=x, y=y)

        after = regression("ct_slices", features=10, train=25, folder=tmp_path)

        assert (after.x_train == before.x_train).all()
        assert (after.x_users[1:] == before.x_users[1:]).all()
        assert (after.x_users[0] != before.x_users[0]).any()

    def test_constant_columns_are_left_out(self, tmp_path):
        x, y = csv(tmp_path)
        x[:, 0] = 0.7
        (tmp_path / CT_FILES[0]).unlink()
        np.savez(tmp_path / CT_FILES[1], x=x, y=y)

        found = regression("ct_slices", features=3, train=25, folder=tmp_path)

        assert (
            np.corrcoef(found.x_train[:, 0], x[np.random.default_rng([0, 206]).permutation(40)[:25], 1])[0, 1] > 0.999
        )

    @pytest.mark.parametrize(
        ("options", "sentence"), [({"train": 40}, "ask for fewer"), ({"features": 400}, "that vary")]
    )
    def test_more_than_there_is_is_refused(self, tmp_path, options, sentence):
        csv(tmp_path)

        with pytest.raises(ValueError, match=sentence):
            regression("ct_slices", **{"features": 10, "train": 25, "folder": tmp_path, **options})

    def test_classes_are_no_regression(self):
        with pytest.raises(ValueError, match="has classes"):
            regression("digits", features=10)

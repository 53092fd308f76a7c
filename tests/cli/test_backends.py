import json

import jax


def test_backends_are_listed_with_their_devices(cli):
    result = cli("backends")
    assert result.code == 0 and result.err == ""
    default = result.out.splitlines()[2].split()
    assert default[:3] == [jax.devices()[0].platform, "(default)", str(len(jax.local_devices()))]


def test_backends_as_json(cli):
    found = json.loads(cli("backends", "--json").out)["backends"]
    assert [b["default"] for b in found].count(True) == 1
    (cpu,) = [b for b in found if b["platform"] == "cpu"]
    assert [d["id"] for d in cpu["devices"]] == [d.id for d in jax.local_devices(backend="cpu")]

"""Places: texts for people, objects in documents."""

import pickle

from jaxprtool.ir.documents import as_json
from jaxprtool.ir.source_text import UNKNOWN, Place

LIBRARY = Place("/site-packages/lib/dense.py", 10, "Dense.product", "lib/dense.py")
PLACE = Place("/home/me/model.py", 8, "net", "model.py").calling(LIBRARY)


def test_a_place_is_the_text_of_the_terminal_and_an_object_in_json():
    assert PLACE == "model.py:8 ← lib/dense.py:10" and PLACE.user == "model.py:8"
    assert PLACE.behind == LIBRARY == "lib/dense.py:10" and not PLACE.user.behind
    document = as_json(PLACE)
    keys = "path", "line", "function", "display"
    (library,) = document.pop("library")
    assert document == dict(zip(keys, ("/home/me/model.py", 8, "net", "model.py"), strict=True))
    assert library["path"] == "/site-packages/lib/dense.py" and "library" not in library


def test_an_unknown_place_is_empty_and_null():
    assert UNKNOWN == "" and as_json(UNKNOWN) is None
    assert UNKNOWN.calling(UNKNOWN) == "" and UNKNOWN.user == ""


def test_places_survive_pickling_and_json():
    for place in PLACE, UNKNOWN:
        for other in pickle.loads(pickle.dumps(place)), Place.from_json(as_json(place)):
            assert (type(other), other, vars(other)) == (Place, place, vars(place))

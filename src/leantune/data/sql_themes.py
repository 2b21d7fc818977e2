"""The vocabulary of the text-to-SQL task: tables, columns and values of its two halves.

No table, column or value of EVAL_THEMES occurs in TRAIN_THEMES.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """One kind of table. `key` is the column that names a row; its values are unique in a table.

    A number column whose name ends in s counts something ("the number of goals").
    """

    table: str
    singular: str
    key: str
    key_values: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    numbers: dict[str, tuple[int, int, int]]  # lowest, highest, step


def _theme(
    nouns: str,
    key: str,
    key_values: str,
    categories: dict[str, str],
    numbers: dict[str, tuple[int, int, int]],
) -> Theme:
    singular, table = nouns.split()
    split = {column: tuple(values.split()) for column, values in categories.items()}
    return Theme(table, singular, key, tuple(key_values.split()), split, numbers)


_PEOPLE = (
    "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karen Leo Maria Nora Oscar Paula Robert "
    "Sarah Thomas Victor"
)
_PLACES = (
    "Ashford Brighton Carlton Denver Easton Florence Geneva Hamilton Jackson Kingston Lisbon Milton Newport "
    "Oxford Preston Salem"
)
_NAMES = (
    "Aurora Bella Comet Diamond Eagle Falcon Galaxy Harmony Jupiter Liberty Mercury Nova Orion Phoenix "
    "Saturn Titan Victory Zenith"
)
_CITIES = "Paris London Berlin Madrid Rome Vienna"
_COUNTRIES = "France Germany Italy Spain Japan Brazil"
_COLORS = "red blue green black white"

TRAIN_THEMES = (
    _theme(
        "employee employees",
        "name",
        _PEOPLE,
        {"department": "Sales Legal Finance Support", "city": _CITIES},
        {"age": (21, 64, 1), "salary": (2000, 9000, 100)},
    ),
    _theme(
        "student students",
        "name",
        _PEOPLE,
        {"major": "History Physics Biology Music", "city": _CITIES},
        {"age": (17, 29, 1), "score": (40, 100, 1)},
    ),
    _theme(
        "patient patients",
        "name",
        _PEOPLE,
        {"ward": "North South East West", "doctor": "Miller Brown Clark Lewis"},
        {"age": (5, 90, 1), "weight": (100, 250, 5)},
    ),
    _theme(
        "player players",
        "name",
        _PEOPLE,
        {"team": "Lions Tigers Bears Wolves", "position": "guard center forward"},
        {"goals": (1, 40, 1), "height": (160, 210, 1)},
    ),
    _theme(
        "singer singers",
        "name",
        _PEOPLE,
        {"genre": "rock jazz folk blues", "country": _COUNTRIES},
        {"albums": (1, 25, 1), "awards": (30, 60, 1)},
    ),
    _theme(
        "driver drivers",
        "name",
        _PEOPLE,
        {"team": "Lions Tigers Bears Wolves", "country": _COUNTRIES},
        {"wins": (1, 30, 1), "points": (50, 400, 10)},
    ),
    _theme(
        "author authors",
        "name",
        _PEOPLE,
        {"language": "English French German Latin", "country": _COUNTRIES},
        {"novels": (1, 30, 1), "age": (25, 95, 1)},
    ),
    _theme(
        "farmer farmers",
        "name",
        _PEOPLE,
        {"crop": "wheat corn rice barley", "region": "North South East West"},
        {"acres": (10, 300, 10), "cows": (1, 80, 1)},
    ),
    _theme(
        "city cities",
        "name",
        _PLACES,
        {"country": _COUNTRIES, "climate": "dry mild cold humid"},
        {"population": (20000, 900000, 10000), "parks": (1, 40, 1)},
    ),
    _theme(
        "school schools",
        "name",
        _PLACES,
        {"type": "public private charter", "district": "Central Harbor Lake Hill"},
        {"pupils": (200, 1500, 50), "teachers": (10, 90, 1)},
    ),
    _theme(
        "airport airports",
        "name",
        _PLACES,
        {"country": _COUNTRIES, "owner": "public private army"},
        {"gates": (4, 60, 1), "flights": (100, 900, 20)},
    ),
    _theme(
        "hotel hotels",
        "name",
        _NAMES,
        {"city": _CITIES, "style": "modern classic rustic"},
        {"rooms": (20, 90, 1), "price": (100, 400, 10)},
    ),
    _theme(
        "ship ships",
        "name",
        _NAMES,
        {"flag": "Norway Greece Panama Malta", "port": _CITIES},
        {"length": (50, 300, 10), "sailors": (5, 45, 1)},
    ),
    _theme(
        "horse horses",
        "name",
        _NAMES,
        {"color": _COLORS, "breed": "Arab Shire Pony Mustang"},
        {"races": (1, 40, 1), "weight": (400, 600, 10)},
    ),
    _theme(
        "car cars",
        "model",
        _NAMES,
        {"color": _COLORS, "fuel": "petrol diesel electric hybrid"},
        {"price": (10000, 60000, 1000), "doors": (2, 20, 1)},
    ),
    _theme(
        "phone phones",
        "model",
        _NAMES,
        {"color": _COLORS, "maker": "Apex Bolt Core Delta"},
        {"price": (100, 1200, 20), "memory": (4, 64, 2)},
    ),
    _theme(
        "film films",
        "title",
        _NAMES,
        {"genre": "drama comedy horror action", "country": _COUNTRIES},
        {"year": (1950, 2020, 1), "minutes": (80, 190, 2)},
    ),
    _theme(
        "song songs",
        "title",
        _NAMES,
        {"genre": "rock jazz folk blues", "artist": "Miller Brown Clark Lewis"},
        {"year": (1950, 2020, 1), "seconds": (100, 400, 10)},
    ),
    _theme(
        "game games",
        "title",
        _NAMES,
        {"platform": "console mobile desktop", "maker": "Apex Bolt Core Delta"},
        {"levels": (1, 16, 1), "price": (20, 80, 2)},
    ),
    _theme(
        "team teams",
        "name",
        _PLACES,
        {"coach": "Miller Brown Clark Lewis", "league": "Gold Silver Bronze"},
        {"wins": (1, 30, 1), "fans": (1000, 9000, 200)},
    ),
    _theme(
        "bridge bridges",
        "name",
        _PLACES,
        {"material": "steel stone wood", "river": "Thames Rhine Seine Tiber"},
        {"length": (100, 900, 20), "lanes": (1, 14, 1)},
    ),
    _theme(
        "flight flights",
        "code",
        "AX10 BX21 CX32 DX43 EX54 FX65 GX76 HX87 JX98 KX19 LX28 MX37 NX46 PX55",
        {"origin": _CITIES, "airline": "Apex Bolt Core Delta"},
        {"seats": (50, 250, 10), "stops": (1, 15, 1)},
    ),
    _theme(
        "order orders",
        "code",
        "A101 B202 C303 D404 E505 F606 G707 H808 J909 K111 L222 M333 N444 P555",
        {"status": "open paid sent late", "client": _PEOPLE},
        {"total": (100, 900, 10), "items": (1, 40, 1)},
    ),
    _theme(
        "course courses",
        "title",
        "Algebra Botany Chemistry Drawing Ethics French Geometry History Italian "
        "Logic Music Optics Physics Statistics",
        {"teacher": _PEOPLE, "level": "basic medium advanced"},
        {"credits": (1, 18, 1), "hours": (20, 90, 2)},
    ),
    _theme(
        "camera cameras",
        "model",
        _NAMES,
        {"maker": "Apex Bolt Core Delta", "sensor": "full half micro"},
        {"weight": (200, 900, 20), "pixels": (8, 60, 1)},
    ),
)

_FOLK = (
    "Adam Bianca Carlos Diana Ethan Fatima George Hannah Isaac Julia Kevin Laura Martin Nina Olivia Peter "
    "Quinn Rosa Simon Tara"
)
_SPOTS = (
    "Arden Belmont Camden Dover Elgin Fairview Grafton Hudson Ironton Jasper Kenton Lowell Monroe Norwood "
    "Oakland Paxton"
)
_LABELS = (
    "Alpha Breeze Cobra Dragon Ember Frost Glory Hunter Ivory Jade Karma Lotus Magic Nectar Opal Pearl "
    "Quartz Raven"
)

EVAL_THEMES = (
    _theme(
        "museum museums",
        "label",
        _SPOTS,
        {"topic": "art science war nature", "founder": "Stone Wood Reed Frost"},
        {"visitors": (1000, 9000, 200), "halls": (2, 40, 1)},
    ),
    _theme(
        "nurse nurses",
        "nickname",
        _FOLK,
        {"clinic": "Sunrise Valley Mercy Hope", "shift": "day night evening"},
        {"wage": (100, 900, 20), "years": (1, 35, 1)},
    ),
    _theme(
        "wine wines",
        "brand",
        _LABELS,
        {"grape": "Merlot Malbec Syrah Riesling", "cellar": "upper lower main"},
        {"bottles": (100, 800, 20), "vintage": (1960, 2020, 1)},
    ),
    _theme(
        "boat boats",
        "label",
        _LABELS,
        {"harbor": "Bergen Genoa Dublin Naples", "captain": "Stone Wood Reed Gray"},
        {"speed": (10, 45, 1), "tons": (50, 500, 10)},
    ),
    _theme(
        "actor actors",
        "nickname",
        _FOLK,
        {"studio": "Orbit Prism Vertex", "agent": "Stone Wood Reed Gray"},
        {"roles": (1, 50, 1), "fee": (100, 900, 10)},
    ),
    _theme(
        "laptop laptops",
        "brand",
        _LABELS,
        {"vendor": "Zenix Korva Tolo Mirax", "system": "linux windows chrome"},
        {"cores": (2, 32, 1), "cost": (400, 2500, 50)},
    ),
    _theme(
        "mountain mountains",
        "label",
        _SPOTS,
        {"state": "Utah Nevada Oregon Idaho", "mineral": "granite basalt slate"},
        {"altitude": (1500, 4500, 50), "trails": (1, 30, 1)},
    ),
    _theme(
        "dog dogs",
        "nickname",
        _FOLK,
        {"kennel": "Sunrise Valley Mercy Hope", "coat": "short long curly"},
        {"tricks": (1, 25, 1), "meals": (30, 90, 1)},
    ),
    _theme(
        "factory factories",
        "label",
        _SPOTS,
        {"product": "tires paper glass soap", "state": "Utah Nevada Oregon Idaho"},
        {"workers": (100, 900, 20), "machines": (5, 60, 1)},
    ),
    _theme(
        "garden gardens",
        "label",
        _SPOTS,
        {"flower": "rose tulip lily daisy", "keeper": "Stone Wood Reed Gray"},
        {"benches": (2, 40, 1), "ponds": (50, 90, 1)},
    ),
)

"""A few products in WebShop's file format, written for these tests."""

import json
import random

ITEMS = [
    {
        "asin": "B000000001",
        "name": "Brook Walnut Console Table with 2 Drawers, Easy Assemble",
        "full_description": "A narrow table for the hallway. Solid wood.",
        "small_description": ["Solid wood top.", "Two drawers. ", ""],
        "pricing": "$120.00 to $180.00",
        "images": ["https://example.org/1.jpg"],
        "product_category": "Home & Kitchen › Furniture › Tables",
        "category": "garden",
        "query": "Console Tables ",
        "customization_options": {
            "Color": [{"value": "Light Walnut ", "image": None}, {"value": "Black/Gold"}],
            "Size": [{"value": "36 Inch"}, {"value": "48 Inch"}],
        },
    },
    {
        "asin": "B000000002",
        "name": "Fern Oak Console Table",
        "full_description": "Oak table.",
        "small_description": "One drawer.",
        "pricing": "$99.5",
        "images": ["https://example.org/2.jpg"],
        "product_category": "Home & Kitchen › Furniture › Tables",
        "category": "garden",
        "query": "console tables",
        "customization_options": "",
    },
    {
        "asin": "B000000003",
        "name": "Women's Linen Dress, Machine Wash",
        "full_description": "A dress for the summer.",
        "small_description": ["Machine wash cold.", "Long sleeve."],
        "pricing": "",
        "images": ["https://example.org/3.jpg"],
        "product_category": "Clothing › Women › Dresses",
        "category": "fashion",
        "query": "women's dresses",
        "customization_options": {"Color": [{"value": "Navy"}, {"value": "Dusty Pink"}], "Fit Type": None},
    },
    {"asin": "B000000001", "name": "The same asin again"},
    {"asin": "B00000000100", "name": "An asin that is too long"},
]

ATTRIBUTES = {
    "B000000001": {
        "attributes": ["easy assemble", "solid wood"],
        "instruction": "Find me easy assemble console tables",
        "instruction_attributes": ["easy assemble"],
    },
    "B000000002": {"attributes": []},
    "B000000003": {
        "attributes": ["machine wash", "long sleeve"],
        "instruction": "Find me long sleeve dresses",
        "instruction_attributes": ["long sleeve", "machine wash"],
    },
}

HUMAN = {
    "B000000003": [
        {
            "asin": "B000000003",
            "instruction": "i want a navy dress i can machine wash.",
            "instruction_attributes": ["machine wash"],
            "instruction_options": ["navy"],
        },
        {
            "asin": "B000000003",
            "instruction": "no attributes here",
            "instruction_attributes": [],
            "instruction_options": [],
        },
    ]
}

REVIEWS = [
    {
        "asin": "B000000002",
        "average_rating": "4.1",
        "reviews": [{"title": "Fine", "stars": 4, "review": "It stands."}],
    }
]


def write(folder):
    """The files of a shelf, by what they hold."""
    paths = {}
    for name, value in (("items", ITEMS), ("attributes", ATTRIBUTES), ("human", HUMAN), ("reviews", REVIEWS)):
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(json.dumps(value))
    return paths


WORDS = """table walnut oak drawer drawers women's linen easy clean 3.5 12-pack naïve BLUE blue the of and
    running runs ran rechargeable u.s.a 1,000 x-large l'oréal high-speed assembled assembly""".split()


def texts(n, seed=0):
    """Texts of 0 to 60 words, with everything that tokens have trouble with."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, 60))) for _ in range(n)]

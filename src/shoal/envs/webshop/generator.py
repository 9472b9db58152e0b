"""A catalogue made by rule from a seed.

Product `i` depends on `(seed, i)` alone, so that shops of different sizes share their first products.
"""

# ruff: noqa: E501  (tables: one kind of goods a line)
from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.core.seeding import stream
from shoal.envs.dice import BulkRandom
from shoal.envs.webshop.catalogue import Catalogue, Instruction, Product, Review, read_prices

_DRAWS = 128  # uniform numbers that a product takes at a time; most need fewer
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPREAD = 0.55  # of the logarithm of prices
_MISSING, _RANGED = 0.05, 0.3  # shares of products without a price and with a price range


def generate_catalogue(n_products: int = 3000, *, seed: int = 0, price_seed: int = 0) -> Catalogue:
    """A shop with goods of some forty kinds, with prices, options, attributes, reviews and instructions.

    >>> shop = generate_catalogue(100)
    >>> shop.products[7] == generate_catalogue(20).products[7]
    True
    """
    products: dict[str, Product] = {}
    for number in range(n_products):
        product = make_product(seed, number)
        products.setdefault(product.asin, product)  # one pair in 36**8 has the same
    return Catalogue(tuple(products.values()), price_seed)


def make_product(seed: int, number: int) -> Product:
    """Product `number` of the shop of `seed`."""
    dice = BulkRandom(stream(seed, "webshop product", number), _DRAWS)
    asin = "B0" + "".join(_DIGITS[dice.below(36)] for _ in range(8))
    kind = dice.choice(KINDS)
    brand = dice.choice(BRAND_STARTS) + dice.choice(BRAND_MIDDLES) + dice.choice(BRAND_ENDS)
    look, name, use = dice.choice(kind.looks), dice.choice(kind.types), dice.choice(kind.uses)
    attributes = tuple(dice.sample(kind.attributes, 2 + dice.below(4)))
    options = {}
    for pool in kind.options:
        option, values = OPTIONS[pool]
        chosen = dice.sample(range(len(values)), 2 + dice.below(min(7, len(values) - 1)))
        options[option] = tuple(values[i] for i in sorted(chosen))
    if dice.uniform() < 0.15:
        options = {}
    prices, tag = read_prices(_pricing(dice, kind))
    rating = 3 + dice.below(20) / 10
    return Product(
        asin=asin,
        title=_title(dice, brand, look, name, use, attributes),
        description=_description(dice, brand, look, name, use, attributes),
        bullets=_bullets(dice, look, name, use, attributes),
        prices=prices,
        price_tag=tag,
        category=kind.category,
        query=kind.query,
        product_category=f"{kind.path} › {name.title()}",
        options=options,
        attributes=attributes,
        rating=f"{rating:.1f}",
        reviews=_reviews(dice, name, rating),
        instructions=tuple(
            _instruction(dice, name, attributes, options) for _ in range(1 + dice.below(5) // 4)
        ),
    )


def _pricing(dice: BulkRandom, kind: Kind) -> str:
    """A price tag: log-normal around the kind's usual price, a range for some, none for a few."""
    # Box-Muller from two uniforms.
    radius = math.sqrt(-2 * math.log(1 - dice.uniform()))
    normal = radius * math.cos(2 * math.pi * dice.uniform())
    low = max(1.0, kind.price * math.exp(_SPREAD * min(3.0, max(-3.0, normal))))
    draw, width = dice.uniform(), 1.05 + 0.6 * dice.uniform()
    if draw < _MISSING:
        return ""
    low = math.floor(low) + (0.99 if dice.uniform() < 0.7 else 0.5)
    high = math.floor(low * width) + 0.99
    return f"${low:.2f} to ${high:.2f}" if draw < _MISSING + _RANGED and high > low else f"${low:.2f}"


def _title(dice: BulkRandom, brand: str, look: str, name: str, use: str, attributes: tuple[str, ...]) -> str:
    shown = ", ".join(attribute.title() for attribute in dice.sample(attributes, 1 + dice.below(2)))
    thing = name.title()
    forms = (
        f"{brand} {look} {thing} for {use}, {shown}",
        f"{brand} {thing}, {look}, {shown}, for {use}",
        f"{look} {thing} by {brand} - {shown} - {use}",
        f"{brand} {shown} {look} {thing} for {use}",
    )
    return dice.choice(forms)


def _description(
    dice: BulkRandom, brand: str, look: str, name: str, use: str, attributes: tuple[str, ...]
) -> str:
    first = dice.choice(
        (
            f"The {look.lower()} {name} by {brand} is made for {use.lower()}.",
            f"{brand} designed this {name} with {use.lower()} in mind.",
            f"A {name} in {look.lower()} that you will reach for every day.",
        )
    )
    facts = " ".join(
        dice.choice(
            (
                f"It is known for: {attribute}.",
                f"Customers like it for {attribute}.",
                f"Feature: {attribute}.",
            )
        )
        for attribute in attributes
    )
    last = dice.choice(
        ("Returns are free within 30 days.", "Ships in plain packaging.", "A gift box is included.")
    )
    return f"{first} {facts} {last}"


def _bullets(
    dice: BulkRandom, look: str, name: str, use: str, attributes: tuple[str, ...]
) -> tuple[str, ...]:
    lines = [f"{attribute.capitalize()}: one reason to choose this {name}." for attribute in attributes[:3]]
    lines.append(f"{look} {name} for {use.lower()}.")
    return tuple(dice.sample(lines, len(lines)))


def _reviews(dice: BulkRandom, name: str, rating: float) -> tuple[Review, ...]:
    reviews = []
    for _ in range(dice.below(4)):
        good = dice.uniform() * 5 < rating
        score = 4 + dice.below(2) if good else 1 + dice.below(3)
        weeks = 1 + dice.below(20)
        body = f"I have had this {name} for {weeks} week{'s' * (weeks > 1)}."
        reviews.append(Review(dice.choice(PRAISE if good else BLAME), f"{score}.0", body))
    return tuple(reviews)


def _instruction(
    dice: BulkRandom, name: str, attributes: tuple[str, ...], options: dict[str, tuple[str, ...]]
) -> Instruction:
    """A wish for this product: some of its attributes and one value of each of its options."""
    wanted = tuple(dice.sample(attributes, 1 + dice.below(3)))
    chosen = {option: dice.choice(values) for option, values in options.items()}
    text = f"{dice.choice(OPENINGS)} {', '.join(wanted)} {name}"
    if chosen:
        text += " with " + ", and ".join(f"{option}: {value}" for option, value in chosen.items())
    return Instruction(text, wanted, chosen)


# --- wares: kinds of goods with their names, attributes, options and usual prices
@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of goods."""

    query: str
    path: str
    category: str
    types: tuple[str, ...]  # what the thing is called
    looks: tuple[str, ...]  # materials and manners that stand before the name
    uses: tuple[str, ...]  # what or whom it is for
    attributes: tuple[str, ...]
    options: tuple[str, ...]  # names of option pools
    price: float  # median, in dollars


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _kind(query: str, path: str, category: str, types: str, looks: str, uses: str, traits: str, options: str,
          price: float) -> Kind:  # fmt: skip
    lists = (_list(types), _list(looks), _list(uses), _list(traits))
    return Kind(query, path.replace(" > ", " › "), category, *lists, _list(options) if options else (), price)


_HOME = "Home & Kitchen > "
_WEAR = "Clothing, Shoes & Jewelry > "
_BEAUTY = "Beauty & Personal Care > "
_TECH = "Electronics > "
_FOOD = "Grocery & Gourmet Food > "
_CLOTH = "machine wash, hand wash, cotton spandex, elastic waist, long sleeve, short sleeve, regular fit, loose fit, slim fit, quality polyester, tumble dry, classic fit, wash cold, drawstring closure"
_SHOE = "rubber sole, non slip, arch support, memory foam, ethylene vinyl, slip resistant, lace up, anti slip, open toe, steel toe, synthetic sole, day comfort"
_SKIN = "cruelty free, paraben free, long lasting, sensitive skin, natural ingredients, dry skin, fine lines, hyaluronic acid, vitamin c, fragrance free, alcohol free, coconut oil, tea tree, sulfate free"
_ROOM = "easy assemble, easy clean, assembly required, solid wood, living room, dining room, storage space, heavy duty, space saving, water resistant, mid century, eco friendly, fully assembled"
_LINEN = "machine washable, super soft, easy care, king size, queen size, living room, ultra soft, eco friendly, fade resistant, hypoallergenic fill, double sided"
_GADGET = "high speed, easy install, fast charging, plug play, high definition, easy use, wireless charging, hands free, noise cancelling, water proof, high resolution, long battery life, dust proof, heavy duty"
_EAT = "gluten free, non gmo, sugar free, low carb, keto friendly, dairy free, soy free, high protein, certified organic, artificial colors free, nut free, plant based, low sodium, ready to eat"

KINDS: tuple[Kind, ...] = (
    _kind("console tables", _HOME + "Furniture > Living Room Furniture > Tables", "garden", "console table, sofa table, entry table", "Walnut, Oak, Reclaimed Pine, Bamboo, Metal Frame", "Hallway, Entryway, Living Room", _ROOM, "finish,width", 140),
    _kind("bookcases", _HOME + "Furniture > Home Office Furniture > Bookcases", "garden", "bookcase, bookshelf, ladder shelf", "Oak, Bamboo, Industrial, Birch", "Home Office, Study, Bedroom", _ROOM, "finish,shelves", 90),
    _kind("office chairs", _HOME + "Furniture > Home Office Furniture > Desk Chairs", "garden", "office chair, desk chair, task chair", "Mesh, Faux Leather, Linen, Ergonomic", "Office, Home Office, Study", _ROOM + ", lumbar support, height adjustable, pu leather", "color", 150),
    _kind("bed frames", _HOME + "Furniture > Bedroom Furniture > Beds", "garden", "bed frame, platform bed, daybed", "Pine, Metal, Upholstered, Rattan", "Bedroom, Guest Room", _ROOM + ", box spring, memory foam", "finish,bed size", 220),
    _kind("ottomans", _HOME + "Furniture > Living Room Furniture > Ottomans", "garden", "ottoman, footstool, pouf", "Velvet, Linen, Leather, Boucle", "Living Room, Bedroom", _ROOM + ", button tufted, pu leather", "color", 65),
    _kind("area rugs", _HOME + "Home Decor > Rugs > Area Rugs", "garden", "area rug, runner rug, floor mat", "Wool, Jute, Shag, Woven", "Living Room, Hallway, Nursery", _LINEN + ", non slip, spot clean, easy clean", "color,rug size", 85),
    _kind("window curtains", _HOME + "Window Treatments > Curtains & Drapes", "garden", "curtain panels, drapes, blackout curtains", "Velvet, Linen, Sheer, Thermal", "Bedroom, Living Room, Kitchen", _LINEN + ", stainless steel grommets", "color,drop", 38),
    _kind("throw pillows", _HOME + "Bedding > Decorative Pillows", "garden", "throw pillow, cushion cover, pillow cover", "Velvet, Chenille, Cotton, Corduroy", "Couch, Bench, Patio", _LINEN + ", lumbar pillow, spot clean", "color,pillow size", 18),
    _kind("throw blankets", _HOME + "Bedding > Blankets & Throws", "garden", "throw blanket, fleece blanket, knit blanket", "Sherpa, Wool, Cotton, Flannel", "Couch, Bed, Camping", _LINEN + ", long lasting", "color,blanket size", 34),
    _kind("candles", _HOME + "Home Decor > Candles & Holders > Candles", "garden", "scented candle, jar candle, pillar candle", "Soy Wax, Beeswax, Coconut Wax", "Bathroom, Bedroom, Gifts", "long lasting, lead free, soy wax, essential oils, eco friendly, clean burning, cruelty free, hand poured", "scent,pack", 19),
    _kind("table lamps", "Tools & Home Improvement > Lighting & Ceiling Fans > Lamps & Shades > Table Lamps", "garden", "table lamp, bedside lamp, desk lamp", "Ceramic, Glass, Marble, Rattan", "Nightstand, Desk, Living Room", "glass shade, easy install, bronze finish, nickel finish, living room, energy efficient, mid century, touch control, brushed nickel", "color", 48),
    _kind("pendants and chandeliers", "Tools & Home Improvement > Lighting & Ceiling Fans > Ceiling Lights > Chandeliers", "garden", "chandelier, pendant light, ceiling light", "Rustic Wood, Glass, Crystal Bead, Rope", "Dining Room, Foyer, Kitchen", "pendant light, dining room, easy install, light fixture, clear glass, brushed nickel, height adjustable, energy efficient", "finish,lights", 120),
    _kind("kitchen storage", _HOME + "Kitchen & Dining > Storage & Organization", "garden", "storage jars, food containers, spice rack", "Glass, Bamboo, Stainless Steel, Ceramic", "Pantry, Kitchen, Countertop", "bpa free, dishwasher safe, easy clean, stainless steel, space saving, air tight, microwave safe, lead free", "color,pack", 27),
    _kind("wall art", _HOME + "Home Decor > Wall Art > Posters & Prints", "garden", "canvas print, wall poster, framed print", "Botanical, Abstract, Mountain, Coastal", "Living Room, Office, Bedroom", "ready hang, living room, dining room, wood frame, high definition, fade resistant, easy hang, water proof", "frame,print size", 42),
    _kind("men's shirts", _WEAR + "Men > Clothing > Shirts", "fashion", "polo shirt, henley shirt, button down shirt, t-shirt", "Cotton, Linen, Flannel, Pique", "Men, Work, Travel", _CLOTH, "color,wear size", 26),
    _kind("men's pants", _WEAR + "Men > Clothing > Pants", "fashion", "chino pants, cargo pants, joggers", "Twill, Denim, Fleece, Corduroy", "Men, Hiking, Office", _CLOTH, "color,waist", 36),
    _kind("women's dresses", _WEAR + "Women > Clothing > Dresses", "fashion", "maxi dress, sundress, wrap dress, midi dress", "Chiffon, Linen, Floral, Satin", "Women, Summer, Parties", _CLOTH + ", high waist, unique design", "color,wear size", 34),
    _kind("women's tops, tees & blouses", _WEAR + "Women > Clothing > Tops, Tees & Blouses", "fashion", "tunic top, blouse, tank top", "Silk, Rayon, Ribbed, Lace", "Women, Office, Summer", _CLOTH, "color,wear size", 24),
    _kind("sweaters", _WEAR + "Women > Clothing > Sweaters", "fashion", "cardigan, pullover sweater, turtleneck", "Merino, Cable Knit, Mohair, Cotton", "Women, Fall, Winter", _CLOTH, "color,wear size", 39),
    _kind("coats & jackets", _WEAR + "Men > Clothing > Jackets & Coats", "fashion", "rain jacket, parka, bomber jacket, windbreaker", "Quilted, Waxed, Fleece, Softshell", "Men, Hiking, Winter", _CLOTH + ", water resistant, light weight", "color,wear size", 72),
    _kind("men's sandals", _WEAR + "Men > Shoes > Sandals", "fashion", "slide sandals, flip flops, sport sandals", "Leather, Cork, Mesh, Suede", "Men, Beach, Walking", _SHOE, "color,shoe size", 33),
    _kind("women's sneakers", _WEAR + "Women > Shoes > Fashion Sneakers", "fashion", "sneakers, running shoes, slip-on shoes", "Canvas, Knit, Suede, Mesh", "Women, Walking, Gym", _SHOE, "color,shoe size,fit", 52),
    _kind("boots", _WEAR + "Women > Shoes > Boots", "fashion", "ankle boots, chelsea boots, snow boots", "Leather, Suede, Rubber, Felt", "Women, Winter, Rain", _SHOE, "color,shoe size", 74),
    _kind("backpacks", _WEAR + "Luggage & Travel Gear > Backpacks", "fashion", "backpack, daypack, rucksack", "Canvas, Nylon, Leather, Waxed Cotton", "School, Travel, Commuters", "water resistant, laptop compartment, carry on, usb port, light weight, heavy duty, easy carry, leather strap", "color,capacity", 46),
    _kind("skin care tools", _BEAUTY + "Skin Care > Face > Creams & Moisturizers", "beauty", "face cream, moisturizer, night cream", "Ceramide, Aloe, Oat, Squalane", "Women, Men, Face", _SKIN, "skin type,volume", 21),
    _kind("face serums", _BEAUTY + "Skin Care > Face > Treatments & Masks > Serums", "beauty", "face serum, facial oil, ampoule", "Retinol, Rosehip, Peptide, Collagen", "Face, Neck, Eyes", _SKIN + ", anti aging, dark circles", "skin type,volume", 24),
    _kind("hair masks", _BEAUTY + "Hair Care > Hair Masks", "beauty", "hair mask, deep conditioner, hair treatment", "Keratin, Argan, Honey, Biotin", "Curls, Salon, Family", "sulfate free, paraben free, damaged hair, dry hair, hair growth, argan oil, cruelty free, natural hair, coconut oil, color treated", "scent,volume", 17),
    _kind("shampoo", _BEAUTY + "Hair Care > Shampoo & Conditioner > Shampoos", "beauty", "shampoo, clarifying shampoo, shampoo bar", "Keratin, Rosemary, Oat, Charcoal", "Men, Kids, Salon", "sulfate free, paraben free, hair loss, dry scalp, cruelty free, damaged hair, hair growth, tea tree, plastic free, color treated", "scent,volume", 14),
    _kind("lips makeup", _BEAUTY + "Makeup > Lips > Lipstick", "beauty", "lipstick, lip gloss, lip tint", "Matte, Satin, Shimmer, Velvet", "Daily Makeup, Weddings, Gifts", "long lasting, cruelty free, highly pigmented, easy apply, paraben free, smudge proof, water proof, hyaluronic acid", "shade", 12),
    _kind("mouthwash", _BEAUTY + "Oral Care > Mouthwash", "beauty", "mouthwash, oral rinse, breath spray", "Herbal, Charcoal, Xylitol", "Kids, Adults, Travel", "alcohol free, fluoride free, bad breath, fresh breath, sensitive teeth, teeth whitening, sugar free, cruelty free", "mint flavor,volume", 9),
    _kind("makeup brushes", _BEAUTY + "Tools & Accessories > Makeup Brushes", "beauty", "makeup brush set, blending sponge, powder brush", "Bamboo, Goat Hair, Velvet, Marble", "Foundation, Eyes, Travel", "cruelty free, easy clean, easy carry, non toxic, synthetic hair, latex free, high quality, eco friendly", "color,pack", 16),
    _kind("headphones", _TECH + "Headphones > Over-Ear Headphones", "electronics", "headphones, earbuds, headset", "Studio, Sport, Bluetooth, Retro", "Running, Travel, Gaming", _GADGET + ", stereo sound, carrying case", "color", 58),
    _kind("bluetooth speakers", _TECH + "Portable Audio & Video > Portable Bluetooth Speakers", "electronics", "bluetooth speaker, soundbar, shower speaker", "Mini, Fabric, Rugged, Wooden", "Beach, Desk, Parties", _GADGET + ", stereo sound, easy carry", "color", 44),
    _kind("phone cases", "Cell Phones & Accessories > Cases, Holsters & Sleeves > Basic Cases", "electronics", "phone case, wallet case, bumper case", "Silicone, Leather, Clear, Carbon Fiber", "Phones, Travel, Work", "wireless charging, tempered glass, heavy duty, shock proof, scratch resistant, easy install, card slot, anti yellowing", "color,phone model", 15),
    _kind("chargers & cables", _TECH + "Computers & Accessories > Cables & Interconnects", "electronics", "charging cable, wall charger, usb hub", "Braided, Compact, Magnetic, Aluminum", "Tablets, Laptops, Cars", _GADGET + ", usb port, gold plated", "color,cable length", 17),
    _kind("security cameras", _TECH + "Security & Surveillance > Surveillance Cameras", "electronics", "security camera, doorbell camera, baby monitor", "Solar, Indoor, Outdoor, Dome", "Home, Porch, Nursery", _GADGET + ", motion detection, night vision, 1080p hd", "color,camera pack", 69),
    _kind("tripods", _TECH + "Camera & Photo > Tripods & Monopods", "electronics", "tripod, selfie stick, phone holder", "Aluminum, Carbon Fiber, Flexible", "Vlogging, Travel, Hiking", "quick release, easy carry, carbon fiber, aluminum alloy, light weight, easy use, non slip, height adjustable", "color,height", 35),
    _kind("smartwatches", _TECH + "Wearable Technology > Smartwatches", "electronics", "smartwatch, fitness tracker, watch band", "Silicone, Stainless, Leather, Ceramic", "Men, Women, Swimming", _GADGET + ", heart rate monitor, sleep tracking", "color,band size", 79),
    _kind("snack bars", _FOOD + "Breakfast Foods > Breakfast & Cereal Bars", "grocery", "granola bars, protein bars, energy bites", "Almond, Oat, Peanut Butter, Quinoa", "Lunch Boxes, Hiking, Kids", _EAT, "flavor,count", 22),
    _kind("chips & crisps", _FOOD + "Snack Foods > Chips & Crisps", "grocery", "potato chips, tortilla chips, veggie crisps", "Kettle, Lentil, Cassava, Corn", "Parties, Lunch Boxes, Movies", _EAT, "savory,count", 19),
    _kind("coffee", _FOOD + "Beverages > Coffee > Ground Coffee", "grocery", "ground coffee, coffee pods, cold brew", "Arabica, Single Origin, Decaf, Mountain", "Office, Mornings, Camping", "non gmo, certified organic, fair trade, low acid, gluten free, sugar free, rich flavor, shade grown", "roast,count", 24),
    _kind("tea", _FOOD + "Beverages > Tea > Herbal Tea", "grocery", "herbal tea, green tea, tea sachets", "Chamomile, Hibiscus, Ginger, Rooibos", "Evenings, Gifts, Office", "caffeine free, certified organic, non gmo, fair trade, sugar free, individually wrapped, gluten free, plastic free", "flavor,count", 15),
    _kind("pasta & noodles", _FOOD + "Pantry Staples > Pasta & Noodles", "grocery", "penne pasta, ramen noodles, rice noodles", "Lentil, Buckwheat, Chickpea, Durum", "Dinner, Soups, Families", _EAT, "count", 20),
    _kind("nuts & dried fruit", _FOOD + "Snack Foods > Nuts & Seeds", "grocery", "roasted nuts, trail mix, dried fruit", "Cashew, Pecan, Apricot, Pistachio", "Hiking, Baking, Gifts", _EAT, "savory,weight", 23),
)  # fmt: skip

OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "color": ("color", _list("black, white, navy, light blue, dark gray, forest green, burgundy, beige, khaki, dusty pink, mustard, teal, olive, lavender, rust, heather gray, royal blue, coral, ivory, charcoal, brown, yellow, purple, silver, off white")),
    "finish": ("color", _list("walnut, natural oak, espresso, white, rustic brown, black, gray oak, honey, cherry, antique white")),
    "shade": ("color", _list("01 nude, 02 rose, 03 coral, 04 cherry, 05 plum, 06 brick, 07 berry, 08 mauve, 09 peach, 10 wine")),
    "frame": ("style", _list("unframed, black frame, white frame, walnut frame, floating frame")),
    "wear size": ("size", _list("x-small, small, medium, large, x-large, xx-large, 3x-large, 4x-large")),
    "waist": ("size", _list("28w x 30l, 30w x 30l, 32w x 32l, 34w x 32l, 36w x 34l, 38w x 34l")),
    "shoe size": ("size", _list("5, 5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10, 11, 12")),
    "bed size": ("size", _list("twin, twin xl, full, queen, king, california king")),
    "rug size": ("size", _list("2 ft x 3 ft, 2 ft x 8 ft, 4 ft x 6 ft, 5 ft x 7 ft, 8 ft x 10 ft, 9 ft x 12 ft")),
    "drop": ("size", _list("42w x 63l, 52w x 63l, 52w x 84l, 52w x 96l, 70w x 84l")),
    "pillow size": ("size", _list("12 x 20 inch, 16 x 16 inch, 18 x 18 inch, 20 x 20 inch, 24 x 24 inch")),
    "blanket size": ("size", _list("30 x 40 inch, 50 x 60 inch, 60 x 80 inch, 90 x 90 inch, 108 x 90 inch")),
    "print size": ("size", _list("8 x 10 inch, 12 x 16 inch, 16 x 20 inch, 24 x 36 inch, 30 x 40 inch")),
    "width": ("size", _list("36 inch wide, 42 inch wide, 48 inch wide, 55 inch wide, 63 inch wide")),
    "shelves": ("style", _list("3 tier, 4 tier, 5 tier, 6 tier")),
    "lights": ("style", _list("1 bulb, 3 bulbs, 5 bulbs, 8 bulbs, 12 bulbs")),
    "fit": ("fit type", _list("narrow, regular, wide, extra wide")),
    "capacity": ("size", _list("15 liter, 20 liter, 25 liter, 30 liter, 40 liter")),
    "volume": ("size", _list("1 fl oz, 1.7 fl oz, 3.4 fl oz, 8 fl oz, 12 fl oz, 16.9 fl oz, 33.8 fl oz")),
    "weight": ("size", _list("6 ounce, 8 ounce, 16 ounce, 24 ounce, 32 ounce, 5 pound")),
    "pack": ("size", _list("pack of 1, pack of 2, pack of 3, pack of 4, pack of 6, pack of 12")),
    "count": ("size", _list("6 count, 10 count, 12 count, 18 count, 24 count, 36 count, 40 count")),
    "camera pack": ("style", _list("1 camera, 2 cameras, 3 cameras, 4 cameras")),
    "height": ("size", _list("40 inch, 50 inch, 55 inch, 62 inch, 71 inch")),
    "band size": ("size", _list("38mm, 40mm, 41mm, 44mm, 45mm, 49mm")),
    "cable length": ("size", _list("1 foot, 3 feet, 6 feet, 10 feet, 15 feet")),
    "phone model": ("style", _list("model nova 11, model nova 12, model nova 12 pro, model orbit 7, model orbit 8, model orbit 8 ultra")),
    "skin type": ("style", _list("oily skin, combination skin, normal skin, mature skin, acne prone skin")),
    "scent": ("scent", _list("vanilla, eucalyptus, lavender, citrus, cedar, jasmine, unscented, ocean breeze, fig, honey")),
    "mint flavor": ("flavor name", _list("mint, cinnamon, clove, ginger, fennel, anise")),
    "flavor": ("flavor name", _list("chocolate chip, peanut butter, vanilla almond, maple, apple cinnamon, mixed berry, ginger, lemon, mango, coconut")),
    "savory": ("flavor name", _list("sea salt, barbecue, sour cream, jalapeno, garlic, smoky paprika, thyme, chili, truffle, unsalted")),
    "roast": ("flavor name", _list("light roast, medium roast, dark roast, french roast, hazelnut, decaf")),
}  # fmt: skip
"""Option pools: the name on the page and its values."""

BRAND_STARTS = _list(
    "Al, Bren, Cor, Del, Ever, Fen, Gal, Hol, Il, Jun, Kel, Lum, Mar, Nor, Or, Pel, Quil, Ros, Sol, Tam, Ul, Vel, Wes, Yar, Zen"
)
BRAND_MIDDLES = _list("a, e, i, o, an, el, in, or, ba, de, li, mo, ra, ta, vi")
BRAND_ENDS = _list("ck, dale, den, ford, gate, la, lo, mere, nest, nik, ra, ric, ton, va, vex, wick")

OPENINGS = _list(
    "i am looking for, i need, i want to buy, find me, please find, show me, i would like, get me"
)
PRAISE = _list(
    "Exactly what I needed, Good value, Better than expected, A lovely gift, Would buy again, Does the job"
)
BLAME = _list("Not for me, Smaller than it looks, Took a while to arrive, Only fair, Expected more")

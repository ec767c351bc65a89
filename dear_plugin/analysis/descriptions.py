"""The pool of sentences that heads are described with, composed here from word lists and templates.

Every sentence is about one concept of one family; a family may stand for a core attribute. All words and templates are
ours. In a template {} is the word and {a} the word with its article.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

POOL_NAME = "dear_plugin.analysis.descriptions, version 1"


class Family(NamedTuple):
    """Sentences about one kind of concept; `attribute` is the core attribute it stands for, if any."""

    attribute: str | None
    templates: tuple[str, ...]
    words: tuple[str, ...]

    def sentences(self) -> list[str]:
        return [t.format(w, a=with_article(w)) for w in self.words for t in self.templates]


def with_article(word: str) -> str:
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.replace("\n", " ").split(","))


# Families with a small vocabulary in common share no template, or sentences would cluster by template.
_THING = ("a photo of {a}", "{a}", "an image of {a}", "a drawing of {a}")
_SCENE = ("a picture of {}", "an image showing {}", "{}")

FAMILIES: dict[str, Family] = {
    "color": Family("color", ("the color {}", "something {}", "{a} thing", "it is {}", "{} color",
                              "an image in shades of {}"), _words(
        """red, orange, yellow, green, cyan, blue, purple, pink, brown, black, white, gray, beige, maroon,
        crimson, scarlet, magenta, turquoise, teal, navy blue, olive green, lime green, mint green, lavender,
        violet, indigo, gold, silver, bronze, copper, ivory, cream, peach, coral, salmon, mustard yellow, emerald
        green, sky blue, burgundy, charcoal, amber, khaki, lilac, rust red, pastel colors, neon colors, dark
        colors, bright colors""")),
    "shape": Family("shape", ("the shape of {a}", "{a} shape", "{} shape", "a figure in the shape of {a}"), _words(
        """circle, square, triangle, pentagon, hexagon, star, cross, ring, diamond, crescent, rectangle, oval,
        octagon, ellipse, trapezoid, parallelogram, semicircle, spiral, heart, arrow, cube, sphere, pyramid,
        cylinder, cone, arc, zigzag, rounded outline, sharp corner, straight line, curved line, polygon""")),
    "texture": Family("texture", ("{a} texture", "{a} pattern", "it is {}", "{} texture", "{} pattern"), _words(
        """plain, solid, striped, dotted, spotted, checkered, checked, wavy, speckled, smooth, rough, bumpy,
        fuzzy, furry, grainy, woven, braided, knitted, cracked, wrinkled, scaly, shiny, glossy, matte, polished,
        dusty, slimy, porous, ribbed, pleated, lace-like, marbled, grooved, perforated, quilted, honeycombed,
        paisley, crosshatched""")),
    "material": Family("texture", ("a surface made of {}", "close-up of {}", "an object made of {}"), _words(
        """wood, metal, glass, stone, marble, concrete, brick, plastic, leather, cotton, wool, silk, velvet,
        denim, paper, cardboard, rubber, ceramic, clay, sand, ice, rusty iron, bamboo, straw, fur, linen, foil,
        granite""")),
    "thing": Family("object", _THING, _words(
        """house, tree, car, fish, boat, cup, key, flower, umbrella, chair, table, lamp, clock, bottle, book,
        phone, camera, guitar, piano, violin, drum, knife, fork, spoon, plate, bowl, pot, basket, box, bag,
        suitcase, pen, pencil, scissors, hammer, screwdriver, ladder, rope, candle, mirror, pillow, bed, sofa,
        desk, computer, keyboard, television, radio, fan, balloon, kite, ball, doll, toy, trophy, crown, coin,
        flag, map, globe, telescope, microscope, lock, chain, bell, broom, bucket, vase, teapot, toothbrush, comb""")),
    "animals": Family("object", ("a photo of {a}", "{a}", "an image of {a} in the wild"), _words(
        """dog, cat, horse, cow, sheep, pig, goat, lion, tiger, elephant, bear, wolf, fox, deer, rabbit, mouse,
        squirrel, monkey, gorilla, giraffe, zebra, kangaroo, panda, camel, whale, dolphin, shark, octopus,
        jellyfish, crab, frog, snake, lizard, turtle, crocodile, eagle, owl, parrot, penguin, duck, swan, chicken,
        peacock, flamingo, butterfly, bee, ant, spider, beetle, snail""")),
    "food": Family("object", ("a photo of {}", "a plate of {}", "close-up of {}"), _words(
        """pizza, pasta, rice, bread, cheese, soup, salad, steak, sushi, noodles, pancakes, waffles, ice cream,
        chocolate, cake, cookies, doughnuts, apples, bananas, oranges, grapes, strawberries, lemons, tomatoes,
        carrots, potatoes, mushrooms, onions, corn, eggs, sandwiches, burgers, tacos, dumplings, curry, honey,
        nuts, coffee, tea, wine""")),
    "vehicles": Family("object", _THING, _words(
        """bus, truck, motorcycle, bicycle, train, tram, airplane, helicopter, sailboat, ship, ferry, canoe,
        submarine, tractor, ambulance, fire engine, taxi, van, scooter, rocket, hot air balloon, bulldozer, racing
        car, wagon""")),
    "clothing": Family("object", ("a photo of {a}", "a person wearing {a}", "{a}"), _words(
        """hat, scarf, coat, jacket, sweater, shirt, dress, skirt, suit, tie, belt, glove, sock, shoe, boot,
        sandal, uniform, helmet, necklace, bracelet, pair of sunglasses, handbag, backpack, wedding gown, apron,
        hood""")),
    "plants": Family("object", ("a photo of {a}", "{a} in bloom", "close-up of {a}"), _words(
        """rose, tulip, sunflower, daisy, orchid, lily, cactus, fern, palm tree, oak tree, pine tree, bush, vine,
        lotus, maple leaf, blade of grass, moss patch, cherry blossom, dandelion, water lily""")),
    "position": Family("location", ("something in the {}", "it is in the {}", "a photo of a thing in the {}",
                                    "at the {} of the image", "an object in the {} of the picture"), _words(
        """top left, top, top right, left, center, right, bottom left, bottom, bottom right, middle, upper left,
        upper right, lower left, lower right, upper left corner, bottom right corner, left side, right side,
        foreground, background""")),
    "places": Family("location", ("a photo taken in {}", "a picture of {}", "somewhere in {}"), _words(
        """Paris, London, New York, Tokyo, Rome, Venice, Istanbul, Cairo, Sydney, Rio de Janeiro, Moscow, Beijing,
        Mumbai, Dubai, Amsterdam, Barcelona, Iceland, Norway, Scotland, Ireland, Spain, Portugal, Greece, Turkey,
        Morocco, Kenya, South Africa, India, Nepal, China, Japan, Thailand, Vietnam, Indonesia, Australia, New
        Zealand, Canada, Alaska, California, Texas, Mexico, Cuba, Peru, Brazil, Argentina, Chile, the Alps, the
        Himalayas, the Sahara, the Amazon, Antarctica, the Caribbean, the Mediterranean, Siberia""")),
    "landscape": Family("location", ("a photo taken in {a}", "a view of {a}", "a picture of {a}"), _words(
        """mountain valley, sandy beach, dense forest, desert, jungle, meadow, canyon, waterfall, river bank,
        lake, ocean bay, island, volcano, glacier, swamp, cave, cliff, hillside, vineyard, farm field, national
        park, coral reef, countryside, seaside village, harbor, tropical lagoon""")),
    "buildings": Family("location", ("a photo of {a}", "inside {a}", "in front of {a}"), _words(
        """kitchen, bedroom, bathroom, living room, office, classroom, library, museum, church, mosque, temple,
        castle, palace, skyscraper, cottage, barn, factory, hospital, airport, train station, restaurant, cafe,
        supermarket, stadium, theater, bridge, lighthouse, tower, street, alley, market square, garden,
        playground, swimming pool, parking lot, subway station, warehouse, greenhouse, hotel lobby, gym""")),
    "size": Family(None, ("something {}", "{} size", "{a} thing"), _words(
        """small, little, tiny, large, big, huge, gigantic, miniature, tall, short, wide, narrow, long, thick,
        thin, enormous""")),
    "people": Family(None, ("a photo of {a}", "a portrait of {a}", "{a}"), _words(
        """man, woman, boy, girl, baby, toddler, teenager, elderly man, elderly woman, couple, family, crowd,
        group of friends, mother and child, father and son, twin, bride, groom, athlete, dancer, musician, singer,
        actor, painter, doctor, nurse, teacher, student, chef, waiter, farmer, soldier, police officer,
        firefighter, pilot, scientist, engineer, carpenter, fisherman, businessman, lawyer, judge, politician,
        monk, king, queen, tourist, clown""")),
    "body": Family(None, ("close-up of {}", "a photo of {}", "an image of {}"), _words(
        """a hand, a foot, an eye, an ear, a nose, a mouth, teeth, hair, a beard, a shoulder, an arm, a leg, a
        knee, fingers, a back, a neck, a tail, a wing, a paw, a beak, horns, feathers, whiskers, a claw, a fin""")),
    "activity": Family(None, ("a photo of someone {}", "people {}", "{}"), _words(
        """running, walking, jumping, swimming, climbing, dancing, singing, cooking, eating, drinking, reading,
        writing, painting, sleeping, fishing, skiing, surfing, skateboarding, cycling, riding a horse, playing
        football, playing tennis, playing chess, playing the guitar, hiking, camping, shopping, driving, cleaning,
        gardening, fighting, kissing, hugging, laughing, crying, praying, working at a desk, taking a photo,
        throwing a ball, celebrating""")),
    "emotion": Family(None, ("{a} face", "a person who looks {}", "a {} mood"), _words(
        """happy, sad, angry, scared, surprised, disgusted, calm, lonely, excited, bored, proud, ashamed, jealous,
        hopeful, nostalgic, peaceful, anxious, joyful, melancholic, romantic, tense, confused, serious, playful""")),
    "weather": Family(None, (*_SCENE, "a day with {}"), _words(
        """rain, heavy snow, thick fog, a thunderstorm, lightning, strong wind, a rainbow, clear skies, gray
        clouds, hail, a tornado, frost, mist, drizzle, a sandstorm, bright sunshine""")),
    "light": Family(None, ("a picture with {}", "a photo lit by {}", "{}"), _words(
        """golden light, soft light, harsh shadows, backlight, candle light, neon lights, moonlight, sunbeams, a
        spotlight, dim light, a silhouette, reflections, glowing embers, street lamps, fireworks, lens flare, low
        contrast, strong contrast""")),
    "season and time": Family(None, (*_SCENE, "a photo taken in {}"), _words(
        """spring, summer, autumn, winter, the early morning, the afternoon, the evening, the night, sunrise,
        sunset, dawn, dusk, midnight, the nineteenth century, the middle ages, the nineteen twenties, the nineteen
        eighties, the future, ancient times, christmas, halloween, new year""")),
    "photo style": Family(None, ("a photo with {}", "an image with {}", "{}"), _words(
        """a blurred background, motion blur, a long exposure, a fisheye lens, a wide angle, a bird's eye view, a
        low angle, an aerial view, a close-up, a macro view, a panorama, a double exposure, a sepia tone, a
        vintage filter, film grain, high saturation, a tilt-shift effect, a symmetrical composition, a minimal
        composition, a frame within a frame, a shallow depth of field, a selfie, a studio background, a low
        resolution, pixel noise, a white border""")),
    "art medium": Family(None, ("{}", "artwork in the form of {}", "a picture that looks like {}"), _words(
        """an oil painting, a watercolor, a pencil sketch, a charcoal drawing, a cartoon, a comic strip, an anime
        frame, a mosaic, a stained glass window, a sculpture, a statue, graffiti, a woodcut, an engraving, a
        collage, origami, embroidery, a tattoo, a digital rendering, pixel art, a poster, a logo, a diagram, a
        blueprint, a caricature, an abstract painting, cubism, impressionism, surrealism, pop art, a fresco,
        calligraphy""")),
    "numbers": Family(None, ("the number {}", "a picture of {} objects", "a group of {}", "exactly {} things"), _words(
        """one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, twenty, fifty, a hundred, a
        thousand, many, few, several, no""")),
    "letters": Family(None, ("the letter {}", "a word that starts with the letter {}", "text with the letter {}"),
                      _words("A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z")),
    "text and signs": Family(None, ("a picture of {}", "{}", "an image with {}"), _words(
        """handwriting, a printed page, a newspaper, a street sign, a license plate, a menu, a barcode, a
        watermark, a caption, a screenshot, a bold title, italic letters, Chinese characters, Arabic script, a
        chart, a table of numbers, musical notes, a signature, an advertisement, a price tag""")),
    "astronomy": Family(None, ("a picture of {}", "{}", "an image showing {}"), _words(
        """the moon, the sun, stars in the sky, a galaxy, a comet, a planet, an eclipse, the northern lights, an
        astronaut, a space station, a meteor shower, a nebula""")),
    "abstract ideas": Family(None, ("an image about {}", "the idea of {}", "a picture that expresses {}"), _words(
        """freedom, justice, power, wealth, poverty, war, peace, love, death, birth, growth, decay, chaos, order,
        speed, silence, danger, safety, tradition, progress, friendship, solitude, mystery, luxury, simplicity,
        strength, fragility, balance, time, memory, dreams, religion, science, education, nature, technology,
        sport, travel, music, health""")),
}


def default_pool() -> list[str]:
    """All sentences of all families, each once, sorted."""
    return unique_sorted(s for family in FAMILIES.values() for s in family.sentences())


def unique_sorted(sentences: Iterable[str]) -> list[str]:
    """Each sentence once, in an order that does not depend on the order given; blank ones are dropped."""
    return sorted({" ".join(s.split()) for s in sentences} - {""})


def read_pool(path: Path) -> list[str]:
    """A pool from a text file, one sentence a line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file with one sentence a line: {error}") from None
    pool = unique_sorted(text.splitlines())
    if not pool:
        raise ValueError(f"{path} has no sentences: wanted a text file with one sentence a line.")
    return pool


def pool_hash(sentences: Iterable[str]) -> str:
    """sha256 (hex) of the pool, the same for any order of its sentences."""
    return hashlib.sha256("\n".join(unique_sorted(sentences)).encode("utf-8")).hexdigest()


def covered(sentences: Sequence[str], tokenize: Callable[[list[str]], Tensor], known_ids: Collection[int]) -> list[str]:
    """The sentences whose every token a model with a small vocabulary knows (`tiny`)."""
    known = {0, *known_ids}  # 0 pads
    rows = tokenize(list(sentences)).tolist()
    return [s for s, row in zip(sentences, rows, strict=True) if known.issuperset(row)]


def read_textspan(path: Path) -> dict[tuple[int, int], list[str]]:
    """A published TEXTSPAN output: "Layer L, Head H" between rules of dashes, then one sentence a line, best first."""
    described: dict[tuple[int, int], list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        line = " ".join(line.split())
        if not line or set(line) == {"-"}:
            continue
        if line.startswith("Layer ") and ", Head " in line:
            try:
                layer, head = (int(part.split()[-1]) for part in line.split(","))
            except ValueError:
                raise ValueError(f"{path}, line {number}: wanted 'Layer L, Head H', got {line!r}.") from None
            current = described.setdefault((layer, head), [])
        elif current is None:
            raise ValueError(f"{path}, line {number}: a sentence before the first 'Layer L, Head H': {line[:60]!r}.")
        else:
            current.append(line)
    if not described:
        raise ValueError(f"{path} has no 'Layer L, Head H': not a TEXTSPAN output.")
    return described

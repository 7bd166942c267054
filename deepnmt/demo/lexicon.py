"""The words of the demo corpus: English words with their German counterparts, as a dictionary lists them.

Each English word has one German counterpart wherever it is used, so a sentence has one translation. A bar marks what
splits off: `auf|machen` (er macht auf), `pick|up` (picks him up). Tags say what goes with what: a verb names the tags
of its subjects and objects, an adjective those of its nouns, so that sentences are odd at times but never nonsense.

An entry is one object and compares as such, which makes it a quick key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Noun:
    """`gender` is m, f or n. `weak`: the German singular outside the nominative (den Jungen). `genitive`: the ending
    of the German genitive singular, where the noun is neither feminine nor weak."""

    en: str
    de: str
    de_plural: str
    gender: str
    tags: str
    en_plural: str = ""  # empty: regular
    genitive: str = "s"
    weak: str = ""


@dataclass(frozen=True, eq=False)
class Verb:
    """`perfect` as in a dictionary: `ist gegangen`. `changed`: the stem of du and er where it differs from the
    infinitive's (gib). `prep`: the English and the German preposition of the object. `case`: that of the object, a for
    accusative and d for dative. `stative` verbs take neither modals nor adverbs of time."""

    en: str
    de: str
    perfect: str
    objects: str = ""
    past: str = ""  # empty: regular
    changed: str = ""
    subjects: str = "person"
    case: str = "a"
    prep: tuple[str, str] = ("", "")
    stative: bool = False


@dataclass(frozen=True, eq=False)
class Adjective:
    """`stem` is what German endings are put on, where it differs (teuer, teure). No comparative: none is formed."""

    en: str
    de: str
    tags: str
    en_more: str = ""
    de_more: str = ""
    stem: str = ""


NOUNS = (
    Noun("man", "Mann", "Männer", "m", "person he", "men", genitive="es"),
    Noun("woman", "Frau", "Frauen", "f", "person she", "women"),
    Noun("child", "Kind", "Kinder", "n", "person", "children", genitive="es"),
    Noun("boy", "Junge", "Jungen", "m", "person he", weak="Jungen"),
    Noun("girl", "Mädchen", "Mädchen", "n", "person"),
    Noun("teacher", "Lehrer", "Lehrer", "m", "person he"),
    Noun("doctor", "Arzt", "Ärzte", "m", "person he", genitive="es"),
    Noun("friend", "Freund", "Freunde", "m", "person he", genitive="es"),
    Noun("neighbour", "Nachbar", "Nachbarn", "m", "person he", weak="Nachbarn"),
    Noun("student", "Student", "Studenten", "m", "person he", weak="Studenten"),
    Noun("mother", "Mutter", "Mütter", "f", "person she"),
    Noun("father", "Vater", "Väter", "m", "person he"),
    Noun("sister", "Schwester", "Schwestern", "f", "person she"),
    Noun("brother", "Bruder", "Brüder", "m", "person he"),
    Noun("daughter", "Tochter", "Töchter", "f", "person she"),
    Noun("son", "Sohn", "Söhne", "m", "person he", genitive="es"),
    Noun("aunt", "Tante", "Tanten", "f", "person she"),
    Noun("uncle", "Onkel", "Onkel", "m", "person he"),
    Noun("queen", "Königin", "Königinnen", "f", "person she"),
    Noun("king", "König", "Könige", "m", "person he"),
    Noun("dog", "Hund", "Hunde", "m", "animal", genitive="es"),
    Noun("cat", "Katze", "Katzen", "f", "animal"),
    Noun("horse", "Pferd", "Pferde", "n", "animal", genitive="es"),
    Noun("bird", "Vogel", "Vögel", "m", "animal"),
    Noun("cow", "Kuh", "Kühe", "f", "animal"),
    Noun("book", "Buch", "Bücher", "n", "thing lie read write", genitive="es"),
    Noun("letter", "Brief", "Briefe", "m", "thing lie read write", genitive="es"),
    Noun("newspaper", "Zeitung", "Zeitungen", "f", "thing lie read"),
    Noun("picture", "Bild", "Bilder", "n", "thing lie paint", genitive="es"),
    Noun("key", "Schlüssel", "Schlüssel", "m", "thing lie"),
    Noun("knife", "Messer", "Messer", "n", "thing lie", "knives"),
    Noun("ball", "Ball", "Bälle", "m", "thing lie"),
    Noun("watch", "Uhr", "Uhren", "f", "thing lie repair"),
    Noun("coat", "Mantel", "Mäntel", "m", "thing lie wear"),
    Noun("shirt", "Hemd", "Hemden", "n", "thing lie wear", genitive="es"),
    Noun("jacket", "Jacke", "Jacken", "f", "thing lie wear"),
    Noun("table", "Tisch", "Tische", "m", "thing stand surface repair", genitive="es"),
    Noun("chair", "Stuhl", "Stühle", "m", "thing stand surface repair", genitive="es"),
    Noun("lamp", "Lampe", "Lampen", "f", "thing stand switch repair"),
    Noun("radio", "Radio", "Radios", "n", "thing stand switch repair"),
    Noun("computer", "Computer", "Computer", "m", "thing stand switch repair"),
    Noun("cup", "Tasse", "Tassen", "f", "thing stand"),
    Noun("glass", "Glas", "Gläser", "n", "thing stand", genitive="es"),
    Noun("box", "Kiste", "Kisten", "f", "thing stand open surface container"),
    Noun("bag", "Tasche", "Taschen", "f", "thing stand open container"),
    Noun("car", "Auto", "Autos", "n", "thing wash repair"),
    Noun("bicycle", "Fahrrad", "Fahrräder", "n", "thing wash repair", genitive="es"),
    Noun("door", "Tür", "Türen", "f", "open part"),
    Noun("window", "Fenster", "Fenster", "n", "open part"),
    Noun("apple", "Apfel", "Äpfel", "m", "food lie fruit"),
    Noun("pear", "Birne", "Birnen", "f", "food lie fruit"),
    Noun("cherry", "Kirsche", "Kirschen", "f", "food lie fruit"),
    Noun("egg", "Ei", "Eier", "n", "food lie cook", genitive="es"),
    Noun("potato", "Kartoffel", "Kartoffeln", "f", "food lie cook", "potatoes"),
    Noun("sausage", "Wurst", "Würste", "f", "food lie cook"),
    Noun("cake", "Kuchen", "Kuchen", "m", "food stand"),
    Noun("garden", "Garten", "Gärten", "m", "place inside"),
    Noun("house", "Haus", "Häuser", "n", "place inside building", genitive="es"),
    Noun("kitchen", "Küche", "Küchen", "f", "place inside tidy"),
    Noun("room", "Zimmer", "Zimmer", "n", "place inside tidy"),
    Noun("school", "Schule", "Schulen", "f", "place inside building"),
    Noun("church", "Kirche", "Kirchen", "f", "place inside building"),
    Noun("museum", "Museum", "Museen", "n", "place inside building sight"),
    Noun("park", "Park", "Parks", "m", "place inside sight"),
    Noun("forest", "Wald", "Wälder", "m", "place inside sight", genitive="es"),
    Noun("city", "Stadt", "Städte", "f", "place inside sight town"),
    Noun("village", "Dorf", "Dörfer", "n", "place inside sight town", genitive="es"),
)

TRANSITIVE = (
    Verb("buy", "kaufen", "hat gekauft", "thing food animal", "bought"),
    Verb("sell", "verkaufen", "hat verkauft", "thing food animal", "sold"),
    Verb("see", "sehen", "hat gesehen", "person animal thing place", "saw", "sieh", subjects="person animal"),
    Verb("look for", "suchen", "hat gesucht", "person animal thing"),
    Verb("find", "finden", "hat gefunden", "animal thing", "found"),
    Verb("need", "brauchen", "hat gebraucht", "thing", stative=True),
    Verb("have", "haben", "hat gehabt", "thing animal", "had", stative=True),
    Verb("love", "lieben", "hat geliebt", "person animal", stative=True),
    Verb("know", "kennen", "hat gekannt", "person sight", "knew", stative=True),
    Verb("visit", "besuchen", "hat besucht", "person sight"),
    Verb("eat", "essen", "hat gegessen", "food", "ate", "iss"),
    Verb("cook", "kochen", "hat gekocht", "cook"),
    Verb("read", "lesen", "hat gelesen", "read", "read", "lies"),
    Verb("write", "schreiben", "hat geschrieben", "write", "wrote"),
    Verb("carry", "tragen", "hat getragen", "lie stand", changed="träg"),
    Verb("wash", "waschen", "hat gewaschen", "wash wear animal", changed="wäsch"),
    Verb("repair", "reparieren", "hat repariert", "repair"),
    Verb("paint", "malen", "hat gemalt", "paint animal"),
    Verb("feed", "füttern", "hat gefüttert", "animal", "fed"),
    Verb("hear", "hören", "hat gehört", "person animal", "heard", subjects="person animal"),
    Verb("forget", "vergessen", "hat vergessen", "lie", "forgot", "vergiss"),
    Verb("open", "auf|machen", "hat aufgemacht", "open"),
    Verb("close", "zu|machen", "hat zugemacht", "open"),
    Verb("call", "an|rufen", "hat angerufen", "person"),
    Verb("invite", "ein|laden", "hat eingeladen", "person", changed="läd"),
    Verb("pick|up", "ab|holen", "hat abgeholt", "person"),
    Verb("take|along", "mit|nehmen", "hat mitgenommen", "person animal lie", "took", "nimm"),
    Verb("put|on", "an|ziehen", "hat angezogen", "wear", "put"),
    Verb("turn|on", "ein|schalten", "hat eingeschaltet", "switch"),
    Verb("turn|off", "aus|schalten", "hat ausgeschaltet", "switch"),
    Verb("bring|back", "zurück|bringen", "hat zurückgebracht", "lie animal", "brought"),
    Verb("throw|away", "weg|werfen", "hat weggeworfen", "lie", "threw", "wirf"),
    Verb("look at", "an|sehen", "hat angesehen", "person animal", changed="sieh", subjects="person animal"),
    Verb("tidy", "auf|räumen", "hat aufgeräumt", "tidy"),
    Verb("help", "helfen", "hat geholfen", "person", changed="hilf", case="d"),
    Verb("thank", "danken", "hat gedankt", "person", case="d"),
    Verb("answer", "antworten", "hat geantwortet", "person", case="d"),
    Verb("listen to", "zu|hören", "hat zugehört", "person", case="d"),
    Verb("follow", "folgen", "ist gefolgt", "person animal", case="d", subjects="person animal"),
)

DITRANSITIVE = (  # to a person
    Verb("give", "geben", "hat gegeben", "thing food animal", "gave", "gib"),
    Verb("show", "zeigen", "hat gezeigt", "thing animal"),
    Verb("send", "schicken", "hat geschickt", "lie", "sent"),
    Verb("bring", "bringen", "hat gebracht", "lie stand", "brought"),
    Verb("lend", "leihen", "hat geliehen", "thing", "lent"),
)

INTRANSITIVE = (
    Verb("laugh", "lachen", "hat gelacht"),
    Verb("cry", "weinen", "hat geweint"),
    Verb("swim", "schwimmen", "ist geschwommen", past="swam", subjects="person animal"),
    Verb("get up", "auf|stehen", "ist aufgestanden", past="got"),
    Verb("arrive", "an|kommen", "ist angekommen"),
    Verb("fall asleep", "ein|schlafen", "ist eingeschlafen", past="fell", changed="schläf", subjects="person animal"),
    Verb("wake up", "auf|wachen", "ist aufgewacht", past="woke", subjects="person animal"),
    Verb("come back", "zurück|kommen", "ist zurückgekommen", past="came", subjects="person animal"),
)

LOCATED = (  # with or without a place
    Verb("sleep", "schlafen", "hat geschlafen", past="slept", changed="schläf", subjects="person animal"),
    Verb("work", "arbeiten", "hat gearbeitet"),
    Verb("sing", "singen", "hat gesungen", past="sang"),
    Verb("dance", "tanzen", "hat getanzt"),
    Verb("wait", "warten", "hat gewartet", subjects="person animal"),
    Verb("play", "spielen", "hat gespielt", subjects="person animal"),
)

POSED = (  # of things, with a place
    Verb("lie", "liegen", "hat gelegen", past="lay", subjects="lie", stative=True),
    Verb("stand", "stehen", "hat gestanden", past="stood", subjects="stand", stative=True),
)

PLACED = (  # `put` is legen or stellen, as the object lies or stands
    Verb("put", "legen", "hat gelegt", "lie", "put"),
    Verb("put", "stellen", "hat gestellt", "stand", "put"),
)

PREPOSITIONAL = (
    Verb("wait", "warten", "hat gewartet", "person", prep=("for", "auf")),
    Verb("think", "denken", "hat gedacht", "person animal", "thought", prep=("of", "an")),
    Verb("laugh", "lachen", "hat gelacht", "person", prep=("about", "über")),
    Verb("speak", "sprechen", "hat gesprochen", "person", "spoke", "sprich", case="d", prep=("with", "mit")),
    Verb("play", "spielen", "hat gespielt", "person animal", case="d", prep=("with", "mit"), subjects="person animal"),
    Verb("dance", "tanzen", "hat getanzt", "person", case="d", prep=("with", "mit")),
    Verb("dream", "träumen", "hat geträumt", "person animal", case="d", prep=("of", "von")),
    Verb("live", "wohnen", "hat gewohnt", "person", case="d", prep=("with", "bei"), stative=True),
    Verb("go", "gehen", "ist gegangen", "person", "went", case="d", prep=("to", "zu")),
    Verb("come", "kommen", "ist gekommen", "inside", "came", case="d", prep=("out of", "aus")),
)

MOTION = (  # with a direction
    Verb("go", "gehen", "ist gegangen", past="went"),
    Verb("run", "laufen", "ist gelaufen", past="ran", changed="läuf", subjects="person animal"),
    Verb("jump", "springen", "ist gesprungen", subjects="person animal"),
    Verb("drive", "fahren", "ist gefahren", past="drove", changed="fähr"),
)

SAYING = (  # with a that-clause
    Verb("know", "wissen", "hat gewusst", past="knew", stative=True),
    Verb("say", "sagen", "hat gesagt", past="said"),
    Verb("believe", "glauben", "hat geglaubt", stative=True),
    Verb("hope", "hoffen", "hat gehofft", stative=True),
)

GIVE = DITRANSITIVE[0]
LIVE = Verb("live", "wohnen", "hat gewohnt", stative=True)
COST = Verb("cost", "kosten", "hat gekostet", past="cost", subjects="thing")
READ = next(verb for verb in TRANSITIVE if verb.en == "read")

ADJECTIVES = (
    Adjective("old", "alt", "person animal thing place part", "older", "älter"),
    Adjective("big", "groß", "person animal thing place part food", "bigger", "größer"),
    Adjective("small", "klein", "person animal thing place part food", "smaller", "kleiner"),
    Adjective("beautiful", "schön", "person animal thing place", "more beautiful", "schöner"),
    Adjective("young", "jung", "person animal", "younger", "jünger"),
    Adjective("clever", "klug", "person animal", "cleverer", "klüger"),
    Adjective("strong", "stark", "person animal", "stronger", "stärker"),
    Adjective("tired", "müde", "person animal", "more tired", "müder", stem="müd"),
    Adjective("happy", "glücklich", "person", "happier", "glücklicher"),
    Adjective("friendly", "freundlich", "person", "friendlier", "freundlicher"),
    Adjective("rich", "reich", "person", "richer", "reicher"),
    Adjective("hungry", "hungrig", "person animal", "hungrier", "hungriger"),
    Adjective("new", "neu", "thing part", "newer", "neuer"),
    Adjective("expensive", "teuer", "thing", "more expensive", "teurer", stem="teur"),
    Adjective("cheap", "billig", "thing", "cheaper", "billiger"),
    Adjective("heavy", "schwer", "thing", "heavier", "schwerer"),
    Adjective("red", "rot", "thing"),
    Adjective("blue", "blau", "thing"),
    Adjective("black", "schwarz", "thing animal"),
    Adjective("white", "weiß", "thing animal part"),
    Adjective("green", "grün", "thing part"),
    Adjective("fresh", "frisch", "food", "fresher", "frischer"),
    Adjective("sweet", "süß", "fruit", "sweeter", "süßer"),
    Adjective("quiet", "ruhig", "place", "quieter", "ruhiger"),
)

# English, German, the times and moods it goes with
ADVERBS = (
    ("today", "heute", "present past future can must want should"),
    ("now", "jetzt", "present can must want"),
    ("tomorrow", "morgen", "future can must want should"),
    ("yesterday", "gestern", "past"),
    ("every day", "jeden Tag", "present past can must want should"),
    ("in the evening", "am Abend", "present past future can must want should"),
    ("on Monday", "am Montag", "past future can must want should"),
    ("on Sunday", "am Sonntag", "past future can must want should"),
)

# English, German, tags of the nouns that follow. A place takes the dative, a direction the accusative.
PLACES = (
    ("in", "in", "inside"), ("in", "in", "inside"), ("in front of", "vor", "building"),
    ("behind", "hinter", "building"), ("next to", "neben", "building person"), ("on", "auf", "surface"),
    ("under", "unter", "surface"),
)
IN_TOWN = (("in", "in", "town"),)
INSIDE = (("in", "in", "inside"),)
DIRECTIONS = (("into", "in", "inside"), ("into", "in", "inside"), ("behind", "hinter", "building"))
POSITIONS = (("on", "auf", "surface"), ("under", "unter", "surface"), ("into", "in", "container"))

# English subject and object, German nominative, accusative and dative, the slot of its verb forms
PRONOUNS = (
    ("I", "me", "ich", "mich", "mir", 0),
    ("you", "you", "du", "dich", "dir", 1),
    ("he", "him", "er", "ihn", "ihm", 2),
    ("she", "her", "sie", "sie", "ihr", 2),
    ("we", "us", "wir", "uns", "uns", 3),
    ("they", "them", "sie", "sie", "ihnen", 3),
)
POSSESSIVES = (("my", "mein"), ("your", "dein"), ("his", "sein"), ("her", "ihr"), ("our", "unser"), ("their", "ihr"))

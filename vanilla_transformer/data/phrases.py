"""A built-in, offline translation data set of any size: localized phrases.

Every phrase is a template with typed slots. The values in the slots (dates, times, durations,
amounts of money, measures, percentages, countries and languages) are localized from the Unicode
CLDR by Babel; the numbers in words (cardinals, ordinals and years) come from num2words. Both ship
their tables with the package, so nothing is downloaded and the references are right by
construction. The source is always English.

Three properties make the data fit for training and for an honest evaluation:

* The target is a function of the source: both sides show the same fields of the same values.
* The combination of values alone decides the split, so no combination occurs in two splits.
* A phrase depends on nothing but the language, the split, the seed and its position.

All text is in Unicode NFC, and the no-break spaces that CLDR puts inside numbers and units become
plain spaces on both sides: how a space is encoded is typography, not translation.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from random import Random
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from babel import Locale
from babel.dates import TIMEDELTA_UNITS, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import format_currency, format_decimal, format_percent
from babel.units import format_unit
from num2words import num2words

if TYPE_CHECKING:
    from datasets import Dataset

SOURCE_LANGUAGE = "en"
TARGET_LANGUAGES: tuple[str, ...] = ("de", "fr", "es", "it", "nl")
SPLITS: tuple[str, ...] = ("train", "validation", "test")


class Phrase(TypedDict):
    """One English phrase and its translation."""

    source: str
    target: str


# Kinds of value ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of value that can fill a slot.

    Attributes:
        sample: Draws a value. The value holds exactly what a phrase shows and has a stable `repr`.
        render: Localizes `(value, style, locale)`.
        styles: The styles a value can be shown in; both sides of a phrase use the same one.
    """

    sample: Callable[[Random], Any]
    render: Callable[[Any, str, Locale], str]
    styles: tuple[str, ...] = ("",)


_FIRST_DAY, _LAST_DAY = date(1970, 1, 1).toordinal(), date(2049, 12, 31).toordinal()

# English does not abbreviate "May", so the translation of a date in May must not abbreviate either.
_UNABBREVIATED = {"yMMMd": "long", "MMMd": "MMMMd"}

_FIRST_OF_MONTH = {"fr": "1er ", "it": "1º "}


def _sample_date(rng: Random) -> date:
    return date.fromordinal(rng.randint(_FIRST_DAY, _LAST_DAY))


def _sample_month_day(rng: Random) -> date:
    return date(2000, 1, 1) + timedelta(rng.randrange(366))


def _render_date(value: date, style: str, locale: Locale) -> str:
    """Localize a date in a named CLDR format ("long") or a CLDR skeleton ("yMMMd")."""
    if value.month == 5:
        style = _UNABBREVIATED.get(style, style)
    formats = locale.date_formats if style in locale.date_formats else locale.datetime_skeletons
    text = formats[style].apply(value, locale)
    if value.day == 1 and locale.language in _FIRST_OF_MONTH:
        text = re.sub(r"\b1 ", _FIRST_OF_MONTH[locale.language], text, count=1)
    return text


def _sample_time(rng: Random) -> time:
    """Draw a time of day, mostly one without seconds: these are shown if they are not zero."""
    # One o'clock is left out: only this hour is singular in Spanish and Italian ("a la 1:05").
    hour = rng.choice((0, *range(2, 24)))
    return time(hour, rng.randrange(60), rng.randint(1, 59) if rng.random() < 0.15 else 0)


def _render_time(value: time, style: str, locale: Locale) -> str:
    return format_time(value, "medium" if value.second else "short", locale=locale)


_SECONDS = dict(TIMEDELTA_UNITS)
_LONGEST = {"second": 59, "minute": 59, "hour": 23, "day": 30, "week": 12, "month": 11, "year": 99}


def _format_duration(amount: int, unit: str, locale: Locale, direction: bool = False) -> str:
    return format_timedelta(
        timedelta(seconds=amount * _SECONDS[unit]),
        granularity=unit,  # type: ignore[arg-type]  # any unit of TIMEDELTA_UNITS
        threshold=float("inf"),
        add_direction=direction,
        locale=locale,
    )


def _duration(*units: str, compounds: tuple[tuple[str, str], ...]) -> Kind:
    """A length of time: a number of one of the `units`, or of two, "3 hours and 20 minutes"."""

    def sample(rng: Random) -> tuple[tuple[int, str], ...]:
        parts = rng.choice(compounds) if rng.random() < 0.5 else (rng.choice(units),)
        return tuple((rng.randint(1, _LONGEST[unit]), unit) for unit in parts)

    def render(value: tuple[tuple[int, str], ...], style: str, locale: Locale) -> str:
        parts = [_format_duration(amount, unit, locale) for amount, unit in value]
        return parts[0] if len(parts) == 1 else format_list(parts, locale=locale)

    return Kind(sample, render)


def _relative(sign: int) -> Kind:
    """A span of time from now: "in 3 days" (`sign` 1) or "3 days ago" (`sign` -1)."""

    def sample(rng: Random) -> tuple[int, str]:
        unit = rng.choice(("day", "week", "month", "year"))
        return sign * rng.randint(1, _LONGEST[unit]), unit

    def render(value: tuple[int, str], style: str, locale: Locale) -> str:
        return _format_duration(*value, locale, direction=True)

    return Kind(sample, render)


_CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "CAD", "AUD", "SEK", "PLN")


def _sample_money(rng: Random) -> tuple[int, str]:
    """Draw hundredths of a currency, at least 2.00: singulars would take a case in German."""
    currency = rng.choice(_CURRENCIES)
    cents = 200 + rng.randrange(10 ** rng.randint(4, 6))
    return (cents - cents % 100 if currency == "JPY" or rng.random() < 0.5 else cents), currency


def _render_money(value: tuple[int, str], style: str, locale: Locale) -> str:
    cents, currency = value
    amount = Decimal(cents) / 100
    if style == "symbol":
        return format_currency(amount, currency, locale=locale)
    return format_currency(
        amount,
        currency,
        format="#,##0.00" if cents % 100 else "#,##0",
        currency_digits=False,
        format_type="name",
        locale=locale,
    )


def _measure(*units: str, low: int = 2, high: int = 999) -> Kind:
    """A number of tenths of one of the CLDR `units`, from `low` to `high` units."""

    def sample(rng: Random) -> tuple[int, str]:
        tenths = rng.randint(10 * low, 10 * high)
        return (tenths - tenths % 10 if rng.random() < 0.5 else tenths), rng.choice(units)

    def render(value: tuple[int, str], style: str, locale: Locale) -> str:
        tenths, unit = value
        return format_unit(
            Decimal(tenths) / 10,
            unit,
            style,  # type: ignore[arg-type]  # one of Kind.styles
            locale=locale,
        )

    return Kind(sample, render, ("long", "short"))


def _sample_percent(rng: Random) -> int:
    tenths = rng.randint(10, 1000)
    return tenths - tenths % 10 if rng.random() < 0.5 else tenths


def _render_percent(value: int, style: str, locale: Locale) -> str:
    return format_percent(Decimal(value) / 1000, locale=locale, decimal_quantization=False)


def _sample_count(rng: Random) -> int:
    """Draw a plural number with up to five digits, all lengths equally often."""
    return rng.randrange(2, 10 ** rng.randint(1, 5))


def _render_count(value: int, style: str, locale: Locale) -> str:
    return format_decimal(value, locale=locale)


def _render_decimal(value: int, style: str, locale: Locale) -> str:
    return format_decimal(Decimal(value) / 100, locale=locale)


def _sample_cardinal(rng: Random) -> int:
    """Draw a number below 10,000, mostly a small one."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 4)))


def _render_cardinal(value: int, style: str, locale: Locale) -> str:
    return _spell(value, "cardinal", locale.language)


def _render_ordinal(value: int, style: str, locale: Locale) -> str:
    return _spell(value, "ordinal", locale.language)


def _render_year(value: int, style: str, locale: Locale) -> str:
    """Spell a year as it is read: by hundreds before 2000 in English, German and Dutch."""
    if locale.language == "nl":
        if value >= 2000:
            return _render_cardinal(value, style, locale)
        return _spell(value, "year", "nl").replace(" ", "")
    return _spell(value, "year", locale.language)


def _spell(value: int, form: str, language: str) -> str:
    """Write a number in words, with the spelling of num2words corrected where it is not usual."""
    text = num2words(value, lang=language, to=form)
    if form == "ordinal":
        if language == "fr":
            return text.replace("tsième", "tième")  # "quatre-vingtième"
        if language == "es":
            text = text.replace("quadragésimo", "cuadragésimo")
            return {11: "undécimo", 12: "duodécimo"}.get(value, text)
    elif language == "nl":
        return text.replace("duizend", "duizend ").strip()
    elif language == "it":
        text = text.replace("dicotto", "diciotto")  # as in 118
        return re.sub("tre$", "tré", text) if value > 3 else text
    return text


_COUNTRIES = (
    "AR AT AU BE BG BO BR CA CH CL CN CO CU CY CZ DE DK DZ EC EE EG ES ET FI FR GB GE GH GR GT HR"
    " HU ID IE IL IN IS IT JM JO JP KE KR KZ LB LT LU LV MA MG MT MX MY NG NL NO NP NZ PE PH PK PL"
    " PT RO RS SA SE SG SI SK TH TN TR TW UA US UY VN ZA"
)
_LANGUAGES = (
    "ar bg ca cs da de el en eo es et eu fa fi fr ga gl he hi hr hu hy id is it ja ka ko la lt lv"
    " mk mn ms nl no pl pt ro ru sk sl sq sr sv sw th tr uk vi zh"
)


def _name(codes: str, table: str) -> Kind:
    """One of the `codes`, shown as its name in a `table` of CLDR."""
    options = tuple(codes.split())
    return Kind(
        lambda rng: rng.choice(options),
        lambda value, style, locale: getattr(locale, table)[value],
    )


KINDS: dict[str, Kind] = {
    "date": Kind(_sample_date, _render_date, ("long", "yMMMd", "yMd", "short")),
    "weekday_date": Kind(_sample_date, _render_date, ("full", "yMMMEd")),
    "month_day": Kind(_sample_month_day, _render_date, ("MMMMd", "MMMd")),
    "month": Kind(lambda rng: _sample_date(rng).replace(day=1), _render_date, ("yMMMM",)),
    "time": Kind(_sample_time, _render_time),
    "duration": _duration(
        "second", "minute", "hour", compounds=(("hour", "minute"), ("minute", "second"))
    ),
    "period": _duration(
        "day", "week", "month", "year", compounds=(("year", "month"), ("month", "day"))
    ),
    "future": _relative(1),
    "past": _relative(-1),
    "money": Kind(_sample_money, _render_money, ("symbol", "name")),
    "distance": _measure("length-kilometer", "length-meter", "length-mile"),
    "mass": _measure("mass-kilogram", "mass-gram", "mass-tonne"),
    "volume": _measure("volume-liter", "volume-milliliter", "volume-cubic-meter"),
    "area": _measure("area-square-meter", "area-hectare", "area-square-kilometer"),
    "speed": _measure("speed-kilometer-per-hour", "speed-mile-per-hour", high=300),
    "temperature": _measure("temperature-celsius", "temperature-fahrenheit", low=-40, high=99),
    "memory": _measure("digital-megabyte", "digital-gigabyte"),
    "percent": Kind(_sample_percent, _render_percent),
    "count": Kind(_sample_count, _render_count),
    "decimal": Kind(lambda rng: rng.randrange(-(10**5), 10**6), _render_decimal),
    "cardinal": Kind(_sample_cardinal, _render_cardinal),
    "ordinal": Kind(lambda rng: rng.randint(1, 99), _render_ordinal),
    "year": Kind(lambda rng: rng.randint(1100, 2049), _render_year),
    "country": _name(_COUNTRIES, "territories"),
    "language": _name(_LANGUAGES, "languages"),
}


_LOCALES = {language: Locale(language) for language in (SOURCE_LANGUAGE, *TARGET_LANGUAGES)}


@lru_cache(maxsize=2**16)
def _render(kind: str, value: Any, style: str, language: str) -> str:
    """Localize a value, in NFC and with plain spaces; Babel is slow, so values are cached."""
    text = KINDS[kind].render(value, style, _LOCALES[language])
    return unicodedata.normalize("NFC", " ".join(text.split()))


# Templates --------------------------------------------------------------------------------------


class Template(NamedTuple):
    """One sentence in all languages. A slot is the name of a kind, or that name and a digit."""

    en: str
    de: str
    fr: str
    es: str
    it: str
    nl: str


def _same(text: str, **others: str) -> Template:
    """The same text in all languages except those that have another."""
    return Template(*[text] * 6)._replace(**others)


# The wording never depends on a value: a value whose gender, case or article could vary comes after
# a colon. Countries and languages never occur alone, so that each has many combinations and no
# split lacks one.
TEMPLATES: tuple[Template, ...] = (
    _same("{date}"),
    _same("{weekday_date}"),
    _same("{date}, {time}"),
    _same("{money}"),
    _same("{decimal}"),
    _same("{cardinal}"),
    _same("{temperature}, {time}"),
    _same("{country}, {date}"),
    _same("{country}: {percent}", fr="{country} : {percent}"),
    _same(
        "{cardinal} plus {cardinal2}",
        es="{cardinal} más {cardinal2}",
        it="{cardinal} più {cardinal2}",
    ),
    Template(
        "{volume} for {money}",
        "{volume} für {money}",
        "{volume} pour {money}",
        "{volume} por {money}",
        "{volume} per {money}",
        "{volume} voor {money}",
    ),
    Template(
        "The train leaves on {date} at {time}.",
        "Der Zug fährt am {date} um {time} Uhr ab.",
        "Le train part le {date} à {time}.",
        "El tren sale el {date} a las {time}.",
        "Il treno parte il {date} alle {time}.",
        "De trein vertrekt op {date} om {time} uur.",
    ),
    Template(
        "The meeting is on {weekday_date} at {time}.",
        "Die Besprechung ist am {weekday_date} um {time} Uhr.",
        "La réunion a lieu le {weekday_date} à {time}.",
        "La reunión es el {weekday_date} a las {time}.",
        "La riunione è {weekday_date} alle {time}.",
        "De vergadering is op {weekday_date} om {time} uur.",
    ),
    Template(
        "The offer ends on {weekday_date}.",
        "Das Angebot endet am {weekday_date}.",
        "L’offre se termine le {weekday_date}.",
        "La oferta termina el {weekday_date}.",
        "L’offerta scade {weekday_date}.",
        "Het aanbod eindigt op {weekday_date}.",
    ),
    Template(
        "The exhibition runs from {date} to {date2}.",
        "Die Ausstellung läuft vom {date} bis zum {date2}.",
        "L’exposition dure du {date} au {date2}.",
        "La exposición dura del {date} al {date2}.",
        "La mostra dura dal {date} al {date2}.",
        "De tentoonstelling loopt van {date} tot {date2}.",
    ),
    Template(
        "The holidays last from {month_day} to {month_day2}.",
        "Die Ferien dauern vom {month_day} bis zum {month_day2}.",
        "Les vacances durent du {month_day} au {month_day2}.",
        "Las vacaciones duran del {month_day} al {month_day2}.",
        "Le vacanze durano dal {month_day} al {month_day2}.",
        "De vakantie duurt van {month_day} tot {month_day2}.",
    ),
    Template(
        "Every year on {month_day} the shop opens at {time}.",
        "Jedes Jahr am {month_day} öffnet das Geschäft um {time} Uhr.",
        "Chaque année, le {month_day}, le magasin ouvre à {time}.",
        "Cada año, el {month_day}, la tienda abre a las {time}.",
        "Ogni anno, il {month_day}, il negozio apre alle {time}.",
        "Elk jaar op {month_day} gaat de winkel om {time} uur open.",
    ),
    Template(
        "The shop is open from {time} to {time2}.",
        "Das Geschäft ist von {time} bis {time2} Uhr geöffnet.",
        "Le magasin est ouvert de {time} à {time2}.",
        "La tienda está abierta de {time} a {time2}.",
        "Il negozio è aperto dalle {time} alle {time2}.",
        "De winkel is open van {time} tot {time2} uur.",
    ),
    Template(
        "Departure: {time}, arrival: {time2}, price: {money}.",
        "Abfahrt: {time}, Ankunft: {time2}, Preis: {money}.",
        "Départ : {time}, arrivée : {time2}, prix : {money}.",
        "Salida: {time}, llegada: {time2}, precio: {money}.",
        "Partenza: {time}, arrivo: {time2}, prezzo: {money}.",
        "Vertrek: {time}, aankomst: {time2}, prijs: {money}.",
    ),
    Template(
        "The concert begins {future} at {time}.",
        "Das Konzert beginnt {future} um {time} Uhr.",
        "Le concert commence {future} à {time}.",
        "El concierto empieza {future} a las {time}.",
        "Il concerto inizia {future} alle {time}.",
        "Het concert begint {future} om {time} uur.",
    ),
    Template(
        "The parcel arrived {past} and weighed {mass}.",
        "Das Paket kam {past} an und wog {mass}.",
        "Le colis est arrivé {past} et pesait {mass}.",
        "El paquete llegó {past} y pesaba {mass}.",
        "Il pacco è arrivato {past} e pesava {mass}.",
        "Het pakket kwam {past} aan en woog {mass}.",
    ),
    Template(
        "The film lasts {duration} and starts at {time}.",
        "Der Film dauert {duration} und beginnt um {time} Uhr.",
        "Le film dure {duration} et commence à {time}.",
        "La película dura {duration} y empieza a las {time}.",
        "Il film dura {duration} e inizia alle {time}.",
        "De film duurt {duration} en begint om {time} uur.",
    ),
    Template(
        "The film is in {language} and lasts {duration}.",
        "Der Film ist auf {language} und dauert {duration}.",
        "Le film est en {language} et dure {duration}.",
        "La película está en {language} y dura {duration}.",
        "Il film è in {language} e dura {duration}.",
        "De film is in het {language} en duurt {duration}.",
    ),
    Template(
        "The guide is available in {language} for {money}.",
        "Der Reiseführer ist auf {language} für {money} erhältlich.",
        "Le guide est disponible en {language} pour {money}.",
        "La guía está disponible en {language} por {money}.",
        "La guida è disponibile in {language} per {money}.",
        "De gids is in het {language} verkrijgbaar voor {money}.",
    ),
    Template(
        "{count} people speak {language}.",
        "{count} Menschen sprechen {language}.",
        "{count} personnes parlent {language}.",
        "{count} personas hablan {language}.",
        "{count} persone parlano {language}.",
        "{count} mensen spreken {language}.",
    ),
    Template(
        "Source language: {language}, target language: {language2}, date: {date}.",
        "Ausgangssprache: {language}, Zielsprache: {language2}, Datum: {date}.",
        "Langue source : {language}, langue cible : {language2}, date : {date}.",
        "Idioma de origen: {language}, idioma de destino: {language2}, fecha: {date}.",
        "Lingua di partenza: {language}, lingua di arrivo: {language2}, data: {date}.",
        "Brontaal: {language}, doeltaal: {language2}, datum: {date}.",
    ),
    Template(
        "Country: {country}, language: {language}.",
        "Land: {country}, Sprache: {language}.",
        "Pays : {country}, langue : {language}.",
        "País: {country}, idioma: {language}.",
        "Paese: {country}, lingua: {language}.",
        "Land: {country}, taal: {language}.",
    ),
    Template(
        "Destination: {country}, departure: {date}.",
        "Ziel: {country}, Abreise: {date}.",
        "Destination : {country}, départ : {date}.",
        "Destino: {country}, salida: {date}.",
        "Destinazione: {country}, partenza: {date}.",
        "Bestemming: {country}, vertrek: {date}.",
    ),
    Template(
        "From: {country}. To: {country2}. Price: {money}.",
        "Von: {country}. Nach: {country2}. Preis: {money}.",
        "De : {country}. À : {country2}. Prix : {money}.",
        "Desde: {country}. Hasta: {country2}. Precio: {money}.",
        "Da: {country}. A: {country2}. Prezzo: {money}.",
        "Van: {country}. Naar: {country2}. Prijs: {money}.",
    ),
    Template(
        "Country: {country}. Visitors: {count}.",
        "Land: {country}. Besucher: {count}.",
        "Pays : {country}. Visiteurs : {count}.",
        "País: {country}. Visitantes: {count}.",
        "Paese: {country}. Visitatori: {count}.",
        "Land: {country}. Bezoekers: {count}.",
    ),
    Template(
        "On {date} there were {count} visitors.",
        "Am {date} gab es {count} Besucher.",
        "Le {date}, il y a eu {count} visiteurs.",
        "El {date} hubo {count} visitantes.",
        "Il {date} ci sono stati {count} visitatori.",
        "Op {date} waren er {count} bezoekers.",
    ),
    Template(
        "Of {count} visitors, {percent} were satisfied.",
        "Von {count} Besuchern waren {percent} zufrieden.",
        "Sur {count} visiteurs, {percent} étaient satisfaits.",
        "De {count} visitantes, el {percent} estaba satisfecho.",
        "Su {count} visitatori, il {percent} era soddisfatto.",
        "Van {count} bezoekers was {percent} tevreden.",
    ),
    Template(
        "The ticket costs {money}.",
        "Die Fahrkarte kostet {money}.",
        "Le billet coûte {money}.",
        "El billete cuesta {money}.",
        "Il biglietto costa {money}.",
        "Het kaartje kost {money}.",
    ),
    Template(
        "The price rose by {percent} to {money}.",
        "Der Preis stieg um {percent} auf {money}.",
        "Le prix a augmenté de {percent} pour atteindre {money}.",
        "El precio subió un {percent}, hasta {money}.",
        "Il prezzo è salito del {percent} a {money}.",
        "De prijs steeg met {percent} tot {money}.",
    ),
    Template(
        "There is {percent} off until {date}.",
        "Bis zum {date} gibt es {percent} Rabatt.",
        "Jusqu’au {date}, il y a {percent} de réduction.",
        "Hasta el {date} hay un {percent} de descuento.",
        "Fino al {date} c’è uno sconto del {percent}.",
        "Tot {date} is er {percent} korting.",
    ),
    Template(
        "The invoice of {date} amounts to {money}.",
        "Die Rechnung vom {date} beträgt {money}.",
        "La facture du {date} s’élève à {money}.",
        "La factura del {date} asciende a {money}.",
        "La fattura del {date} ammonta a {money}.",
        "De factuur van {date} bedraagt {money}.",
    ),
    Template(
        "Please pay {money} by {date}.",
        "Bitte zahlen Sie {money} bis zum {date}.",
        "Veuillez payer {money} au plus tard le {date}.",
        "Por favor, pague {money} a más tardar el {date}.",
        "Si prega di pagare {money} entro il {date}.",
        "Betaal {money} uiterlijk op {date}.",
    ),
    Template(
        "Sales rose by {percent} in {month}.",
        "Der Umsatz stieg im {month} um {percent}.",
        "Les ventes ont augmenté de {percent} en {month}.",
        "Las ventas subieron un {percent} en {month}.",
        "Le vendite sono aumentate del {percent} nel mese di {month}.",
        "De verkoop steeg in {month} met {percent}.",
    ),
    Template(
        "The rent for {month} is {money}.",
        "Die Miete für {month} beträgt {money}.",
        "Le loyer pour {month} est de {money}.",
        "El alquiler de {month} es de {money}.",
        "L’affitto di {month} è di {money}.",
        "De huur voor {month} is {money}.",
    ),
    Template(
        "The project takes {period} and costs {money}.",
        "Das Projekt dauert {period} und kostet {money}.",
        "Le projet dure {period} et coûte {money}.",
        "El proyecto dura {period} y cuesta {money}.",
        "Il progetto dura {period} e costa {money}.",
        "Het project duurt {period} en kost {money}.",
    ),
    Template(
        "The warranty is valid for {period} from {date}.",
        "Die Garantie gilt {period} ab dem {date}.",
        "La garantie est valable {period} à partir du {date}.",
        "La garantía es válida {period} a partir del {date}.",
        "La garanzia vale {period} a partire dal {date}.",
        "De garantie geldt {period} vanaf {date}.",
    ),
    Template(
        "The distance is {distance} and the trip takes {duration}.",
        "Die Entfernung beträgt {distance} und die Fahrt dauert {duration}.",
        "La distance est de {distance} et le trajet dure {duration}.",
        "La distancia es de {distance} y el viaje dura {duration}.",
        "La distanza è di {distance} e il viaggio dura {duration}.",
        "De afstand is {distance} en de reis duurt {duration}.",
    ),
    Template(
        "Speed: {speed}, distance: {distance}.",
        "Geschwindigkeit: {speed}, Entfernung: {distance}.",
        "Vitesse : {speed}, distance : {distance}.",
        "Velocidad: {speed}, distancia: {distance}.",
        "Velocità: {speed}, distanza: {distance}.",
        "Snelheid: {speed}, afstand: {distance}.",
    ),
    Template(
        "At {time} the temperature was {temperature}.",
        "Um {time} Uhr betrug die Temperatur {temperature}.",
        "À {time}, la température était de {temperature}.",
        "A las {time}, la temperatura era de {temperature}.",
        "Alle {time} la temperatura era di {temperature}.",
        "Om {time} uur was de temperatuur {temperature}.",
    ),
    Template(
        "The box weighs {mass} and contains {volume}.",
        "Die Kiste wiegt {mass} und enthält {volume}.",
        "La caisse pèse {mass} et contient {volume}.",
        "La caja pesa {mass} y contiene {volume}.",
        "La cassa pesa {mass} e contiene {volume}.",
        "De kist weegt {mass} en bevat {volume}.",
    ),
    Template(
        "The plot measures {area} and costs {money}.",
        "Das Grundstück misst {area} und kostet {money}.",
        "Le terrain mesure {area} et coûte {money}.",
        "El terreno mide {area} y cuesta {money}.",
        "Il terreno misura {area} e costa {money}.",
        "Het perceel meet {area} en kost {money}.",
    ),
    Template(
        "Downloading {memory} takes {duration}.",
        "Das Herunterladen von {memory} dauert {duration}.",
        "Le téléchargement de {memory} dure {duration}.",
        "La descarga de {memory} tarda {duration}.",
        "Lo scaricamento di {memory} richiede {duration}.",
        "Het downloaden van {memory} duurt {duration}.",
    ),
    Template(
        "The value went from {decimal} to {decimal2}.",
        "Der Wert ging von {decimal} auf {decimal2}.",
        "La valeur est passée de {decimal} à {decimal2}.",
        "El valor pasó de {decimal} a {decimal2}.",
        "Il valore è passato da {decimal} a {decimal2}.",
        "De waarde ging van {decimal} naar {decimal2}.",
    ),
    Template(
        "Room {cardinal} is free from {date}.",
        "Zimmer {cardinal} ist ab dem {date} frei.",
        "La chambre {cardinal} est libre à partir du {date}.",
        "La habitación {cardinal} está libre a partir del {date}.",
        "La camera {cardinal} è libera dal {date}.",
        "Kamer {cardinal} is vrij vanaf {date}.",
    ),
    Template(
        "The {ordinal} chapter has {count} words.",
        "Das {ordinal} Kapitel hat {count} Wörter.",
        "Le {ordinal} chapitre compte {count} mots.",
        "El capítulo {ordinal} tiene {count} palabras.",
        "Il {ordinal} capitolo conta {count} parole.",
        "Het {ordinal} hoofdstuk telt {count} woorden.",
    ),
    Template(
        "The {ordinal} attempt lasted {duration}.",
        "Der {ordinal} Versuch dauerte {duration}.",
        "Le {ordinal} essai a duré {duration}.",
        "El intento {ordinal} duró {duration}.",
        "Il {ordinal} tentativo è durato {duration}.",
        "De {ordinal} poging duurde {duration}.",
    ),
    Template(
        "The castle dates from {year} and covers {area}.",
        "Das Schloss stammt aus dem Jahr {year} und umfasst {area}.",
        "Le château date de {year} et couvre {area}.",
        "El castillo data de {year} y ocupa {area}.",
        "Il castello risale al {year} e occupa {area}.",
        "Het kasteel dateert uit {year} en beslaat {area}.",
    ),
    Template(
        "In {year} the price was {money}.",
        "Im Jahr {year} betrug der Preis {money}.",
        "En {year}, le prix était de {money}.",
        "En {year}, el precio era de {money}.",
        "Nel {year} il prezzo era di {money}.",
        "In {year} was de prijs {money}.",
    ),
)

# The slots of each template, with their kinds.
_SLOTS: tuple[tuple[tuple[str, str], ...], ...] = tuple(
    tuple((slot, slot.rstrip("2")) for _, slot, _, _ in Formatter().parse(template.en) if slot)
    for template in TEMPLATES
)

# Italian elides the article before the vowels of 8 and 11: "l’8 giugno", "dell’11,5%", "l’ottavo".
_ITALIAN_ELISION = re.compile(r"\b(I|i|a|da|de)l (?=(?:0?8|8\d|11)\b|otta|undic)")
_ELIDED = {"I": "L’", "i": "l’", "a": "all’", "da": "dall’", "de": "dell’"}


def _write(text: str, values: Sequence[tuple[str, str, Any, str]], language: str) -> str:
    """Fill the slots of a template's `text` with `(slot, kind, value, style)` in a language."""
    fillers = {slot: _render(kind, value, style, language) for slot, kind, value, style in values}
    # The full stop of a sentence merges with one of an abbreviation: "3 janv.", "3. Jan.".
    phrase = text.format_map(fillers).replace("..", ".")
    if language == "it":
        phrase = _ITALIAN_ELISION.sub(lambda match: _ELIDED[match[1]], phrase)
    return phrase


# Sampling and splitting -------------------------------------------------------------------------

Combination = tuple[tuple[str, Any], ...]


def _split_of(combination: Combination) -> str:
    """Assign a combination of values to a split by a stable digest: 98, 1 and 1 per cent.

    The digest ignores the template, the styles and the order of the values, so the same values in
    other words are in the same split.
    """
    canonical = repr(sorted(map(repr, combination))).encode()
    bucket = int.from_bytes(blake2b(canonical, digest_size=8).digest(), "big") % 100
    return {0: "test", 1: "validation"}.get(bucket, "train")


def _iter_combinations(
    target_language: str, split: str, seed: int
) -> Iterator[tuple[Combination, Phrase]]:
    """Yield an endless sequence of phrases, each with its `(kind, value)` pairs."""
    # Seeding with a string goes through a cryptographic digest, unlike hash(): it is the same in
    # every process. The language is left out, so the corpora of two languages are parallel.
    rng = Random(f"{split} {seed}")
    while True:
        index = rng.randrange(len(TEMPLATES))
        template, slots = TEMPLATES[index], _SLOTS[index]
        combination = tuple((kind, KINDS[kind].sample(rng)) for _, kind in slots)
        if _split_of(combination) != split:
            continue
        styles = {kind: rng.choice(KINDS[kind].styles) for kind, _ in combination}
        values = [
            (slot, kind, value, styles[kind])
            for (slot, _), (kind, value) in zip(slots, combination, strict=True)
        ]
        yield (
            combination,
            {
                "source": _write(template.en, values, SOURCE_LANGUAGE),
                "target": _write(getattr(template, target_language), values, target_language),
            },
        )


# Public interface -------------------------------------------------------------------------------


def _check(size: int, target_language: str, split: str, seed: int) -> None:
    if target_language not in TARGET_LANGUAGES:
        raise ValueError(
            f"target_language={target_language!r}: expected one of {', '.join(TARGET_LANGUAGES)}"
        )
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {', '.join(SPLITS)}")
    if type(size) is not int or size < 1:
        raise ValueError(f"size={size!r}: expected a positive integer")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed={seed!r}: expected an integer from 0")


def iter_phrases(
    size: int, *, target_language: str = "de", split: str = "train", seed: int = 0
) -> Iterator[Phrase]:
    """Yield localized phrases, one at a time.

    The phrases of a size are the first ones of every larger size, and they are the same in every
    process. Values come from CLDR through Babel, numbers in words from num2words.

    Args:
        size: How many phrases.
        target_language: The language to translate to, one of `TARGET_LANGUAGES`; the source is
            English. If the other arguments are the same, all languages have the same English
            phrases.
        split: One of `SPLITS`. No combination of values occurs in two splits, even with different
            seeds.
        seed: Selects another sequence of phrases.

    Returns:
        An iterator over `size` phrases; a phrase with few possible values can recur.

    Raises:
        ValueError: An argument is not one of the values above.
    """
    _check(size, target_language, split, seed)
    phrases = (phrase for _, phrase in _iter_combinations(target_language, split, seed))
    return islice(phrases, size)


def load_phrases(
    size: int,
    *,
    target_language: str = "de",
    split: str = "train",
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> "Dataset":
    """Generate the phrases of `iter_phrases` into a memory-mapped Arrow file, once.

    A later call with the same arguments reads the file, unless this module, Babel or num2words has
    changed.

    Args:
        size: How many phrases.
        target_language: The language to translate to: "de", "fr", "es", "it" or "nl".
        split: "train", "validation" or "test".
        seed: Selects another sequence of phrases.
        cache_dir: Where to keep the file, by default the cache of `datasets`.

    Returns:
        A `datasets.Dataset` with the string columns "source" and "target".

    Raises:
        ValueError: An argument is not one of the values above.
    """
    from datasets import Dataset, NamedSplit

    from .corpora import PAIR_FEATURES

    _check(size, target_language, split, seed)
    return Dataset.from_generator(
        _generate,
        features=PAIR_FEATURES,
        cache_dir=None if cache_dir is None else str(cache_dir),
        gen_kwargs={
            "size": size,
            "target_language": target_language,
            "split": split,
            "seed": seed,
            "data_version": _data_version(),
        },
        split=NamedSplit(split),
    )


def _generate(
    size: int, target_language: str, split: str, seed: int, data_version: str
) -> Iterator[Phrase]:
    """Adapt `iter_phrases`; `data_version` is only part of the cache key."""
    return iter_phrases(size, target_language=target_language, split=split, seed=seed)


def _data_version() -> str:
    """Identify the versions that the phrases depend on."""
    source = blake2b(Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return f"{source} babel {version('babel')} num2words {version('num2words')}"

"""The small words by which English is told from other languages in Latin letters."""

from typing import Final

ENGLISH_WORDS: Final = """
the of and to is that for with this are be have from or not what how which you your it can by if
does did would should could there their they we my at but has had been its them these those than
then when where who why about into some any all more please write between without our he she his
her him explain using used make give let don were other each such return returns given list
"""
"""Words that other languages share (a, an, as, do, in, me, no, on, so, was, will) are left out."""

FOREIGN_WORDS: Final = """
el los las una que y por con para es del se lo como más pero sus le ya muy sin sobre fue qué cuál
cuándo quién cuántos dónde son está todos tiene también não um uma os dos das em na ao pelo pela
você são seu sua mais foi é e ou qual quem

les des et est dans une sur qui pas au aux ce cette ne vous nous je il elle sont avec pour du quel
quelle combien où quand était tout toute

di che della delle dei gli nel alla sono è anche ma si perché questo ogni degli

și în este sunt care din mai cu nu pe sau fi ce cine când unde cât câte câți fost lui ale

der die das und ist nicht ein eine zu den mit sich auf von für im dem des auch wie ich wir sie wer
wann wo welche welcher welches welchem hat wurde wurden viele bei nach aus oder durch einer einem
eines werden jeder

het een en zijn niet dat op voor met aan ook bij naar ik wij wordt hij de

och att det som är av den inte ett til og ikke jeg har vi skal fra

się nie jest w z na jak co czy oraz od ale je jsou pro ktoré które każdy ma prawo lub nebo není koji
kako su ili

ve bir bu için ile da mi olarak gibi daha ne kaç hangi kim nerede kadar herkes

yang dan ini itu dengan untuk dari pada adalah tidak ke dalam akan atau setiap orang

và là của có không được một cho các này những người với

ja ei että oli myös se ovat hän jokaisella tai oikeus

az és hogy nem egy meg ez csak vagy minden joga

ang ng mga sa ay kwa wa ya ni katika kila la un els amb
"""
"""Spanish and Portuguese; French; Italian; Romanian; German; Dutch; Nordic; Polish, Czech and
Croatian; Turkish; Indonesian; Vietnamese; Finnish; Hungarian; others."""
